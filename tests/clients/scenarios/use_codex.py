"""Codex, headless, over /v1/responses: an answer, a tool's round trip, a further turn, and errors."""

import json
import subprocess
import tempfile
from pathlib import Path

from recorder import Exchange, Recorder, run_program
from report import KEY, MODEL, QUESTION, URL, WRONG_KEY, equal, post, run, scenario

MODULES = Path.cwd() / "node_modules"
HOME = Path(tempfile.mkdtemp(prefix="codex-"))
GREEDY = {"temperature": 0, "stop": ["."]}  # one short sentence
VERSION: str = json.loads((MODULES / "@openai/codex/package.json").read_text())["version"]


def configuration(url: str) -> list[str]:
    """What docs/clients.md puts into config.toml, as options. Fewer tools leave space in a context of 8,192 tokens."""
    provider = {"name": "SpecRay", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "SPECRAY_KEY"}
    options = {f"model_providers.specray.{name}": value for name, value in provider.items()}
    options |= {"model": MODEL, "model_provider": "specray"}
    settings = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return [
        *(part for setting in settings for part in ("--config", setting)),
        *("--disable", "multi_agent"),
        *("--config", "model_context_window=8192"),
        *("--config", "model_providers.specray.request_max_retries=0"),
        *("--config", "model_providers.specray.stream_max_retries=0"),
    ]


def ask(url: str, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = ["codex", "exec", "--skip-git-repo-check", *configuration(url), *arguments]
    return run_program(command, HOME, {"SPECRAY_KEY": key})


def streamed(exchange: Exchange) -> str:
    return "".join(event["delta"] for event in exchange.events if event["type"] == "response.output_text.delta")


def own_answer(exchange: Exchange) -> str:
    """The server's answer to the same request without Codex and without a stream."""
    items = post("/v1/responses", **exchange.body | {"stream": False})["output"]
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])


@scenario
def an_answer_is_the_servers_text():
    with Recorder(URL, GREEDY) as recorder:
        finished = ask(recorder.url, QUESTION)
    equal([exchange.status for exchange in recorder.exchanges], [200])
    [exchange] = recorder.exchanges
    assert "web_search" in [tool["type"] for tool in exchange.body["tools"]]
    assert finished.stdout.strip(), finished.stderr
    equal(finished.stdout.strip(), streamed(exchange).strip())
    equal(streamed(exchange), own_answer(exchange))


@scenario
def a_tool_makes_a_round_trip():
    call = {"tool_choice": {"type": "function", "name": "get_goal"}, "stop": []}
    with Recorder(URL, GREEDY, call) as recorder:
        finished = ask(recorder.url, "Which goal is set?")
    statuses = [exchange.status for exchange in recorder.exchanges]
    assert len(statuses) > 1, finished.stderr
    equal(set(statuses), {200})
    kinds = [item["type"] for item in recorder.exchanges[1].body["input"]]
    assert kinds.index("function_call") < kinds.index("function_call_output"), kinds
    equal(finished.stdout.strip(), streamed(recorder.exchanges[-1]).strip())


@scenario
def a_conversation_is_continued():
    with Recorder(URL, GREEDY) as recorder:
        first = ask(recorder.url, QUESTION)
        second = ask(recorder.url, "resume", "--last", "And of Italy?")
    assert first.stdout.strip(), first.stderr
    assert second.stdout.strip(), second.stderr
    equal({exchange.status for exchange in recorder.exchanges}, {200})
    roles = [item.get("role") for item in recorder.exchanges[-1].body["input"]]
    assert "assistant" in roles, roles


@scenario
def too_many_tokens_are_reported_in_its_words():
    finished = ask(URL, "word " * 9000)
    assert "ran out of room in the model's context window" in finished.stderr, finished.stderr


@scenario
def a_wrong_key_is_an_authentication_error():
    finished = ask(URL, QUESTION, key=WRONG_KEY)
    assert finished.returncode != 0
    assert "401" in finished.stderr, finished.stderr


run(VERSION)
