"""What the scripts in this folder share. It runs in the clients' environments, with the standard library only.

A script registers functions with `scenario` and calls `run`, which prints one line of JSON for each of them.
"""

import asyncio
import inspect
import json
import os
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL = os.environ.get("SPECRAY_URL", "http://127.0.0.1:8000")
BASE_URL = f"{URL}/v1"
KEY = os.environ.get("SPECRAY_KEY", "none")
MODEL = "smollm2"
TIMEOUT_S = os.environ.get("SPECRAY_TIMEOUT_S", "300")  # of the whole script
TOKENIZER = os.environ.get("SPECRAY_TOKENIZER", MODEL)  # a folder: benchmarks count tokens
WRONG_KEY = "sk-wrong"

QUESTION = "What is the capital of France?"
SYSTEM = "You answer in one short sentence."
ASKED = [{"role": "user", "content": QUESTION}]
LIMIT = 24  # tokens of an answer
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

_scenarios: list[Callable[[], Any]] = []


def scenario(body: Callable[[], Any]) -> Callable[[], Any]:
    """Register a scenario: a function, possibly asynchronous, that raises an exception if something does not hold."""
    _scenarios.append(body)
    return body


def run(package: str) -> None:
    """Run all scenarios, and print the version and their outcomes. `package` is one of Python, or the version itself.

    Asynchronous ones share an event loop, because some clients keep connections for all of a process.
    """
    print(json.dumps({"version": package if package[0].isdigit() else version(package)}), flush=True)
    with asyncio.Runner() as runner:
        for body in _scenarios:
            error = None
            try:
                result = body()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"scenario": body.__name__, "error": error}), flush=True)


def post(path: str, **body: Any) -> Any:
    """The server's own reply to a request, without any client."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=float(TIMEOUT_S)) as reply:
        return json.load(reply)


def chat(messages: Any = None, **options: Any) -> Any:
    """The server's own answer to a conversation."""
    options = {"temperature": 0, "max_tokens": LIMIT} | options
    return post("/v1/chat/completions", model=MODEL, messages=messages or ASKED, **options)


def chat_text(messages: Any = None, **options: Any) -> str:
    text: str = chat(messages, **options)["choices"][0]["message"]["content"]
    return text


def equal(found: object, expected: object) -> None:
    """`assert found == expected`, which shows both."""
    assert found == expected, f"\nfound    {found!r}\nexpected {expected!r}"


def is_weather(arguments: Any) -> None:
    """Arguments, or an object, that match WEATHER_SCHEMA."""
    equal(sorted(arguments), ["city", "days"])
    assert arguments["city"] in CITIES, arguments
    assert arguments["days"] in (1, 2, 3), arguments


def raises(kind: type[BaseException], call: Callable[[], Any], *parts: str) -> BaseException:
    """The exception that `call` raises: of this kind, with all `parts` in its text."""
    try:
        call()
    except kind as error:
        _check_parts(error, parts)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


async def raises_async(kind: type[BaseException], coroutine: Any, *parts: str) -> BaseException:
    try:
        await coroutine
    except kind as error:
        _check_parts(error, parts)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def outcome_of(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the exception that it raises: for what a small model may or may not manage."""
    try:
        return call()
    except Exception as error:
        return error


def _check_parts(error: BaseException, parts: tuple[str, ...]) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is not in {str(error)!r}"
