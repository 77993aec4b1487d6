"""opencode, headless, over /v1/chat/completions: an answer, a tool's round trip, and a wrong key."""

import json
import subprocess
import tempfile
from pathlib import Path

from recorder import Exchange, Recorder, run_program
from report import KEY, MODEL, QUESTION, URL, WRONG_KEY, chat_text, equal, run, scenario

HOME = Path(tempfile.mkdtemp(prefix="opencode-"))
GREEDY = {"temperature": 0, "stop": ["."]}  # one short sentence
VERSION: str = json.loads((Path.cwd() / "node_modules/opencode-ai/package.json").read_text())["version"]


def ask(url: str, question: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "SpecRay",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {MODEL: {"name": "SpecRay", "limit": {"context": 8192, "output": 512}}},
    }
    settings = {
        "model": f"specray/{MODEL}",
        "small_model": f"specray/{MODEL}",
        "tools": {"*": False, "read": True},
        "autoupdate": False,
        "share": "disabled",
        "provider": {"specray": provider},
    }
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(settings), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return run_program(["opencode", "run", question], HOME, variables)


def streamed(exchange: Exchange) -> str:
    return "".join(
        choice["delta"].get("content") or "" for event in exchange.events for choice in event.get("choices", [])
    )


def with_tools(exchanges: list[Exchange]) -> list[Exchange]:
    """The requests of the conversation. The other one asks for its title."""
    return [exchange for exchange in exchanges if "tools" in exchange.body]


@scenario
def an_answer_is_the_servers_text():
    with Recorder(URL, GREEDY) as recorder:
        finished = ask(recorder.url, QUESTION)
    equal({exchange.status for exchange in recorder.exchanges}, {200})
    [exchange] = with_tools(recorder.exchanges)
    text = streamed(exchange)
    assert text.strip(), exchange.reply
    assert text.strip() in finished.stdout, finished.stdout + finished.stderr
    names = ("messages", "tools", "tool_choice", "max_tokens", "stop")
    equal(text, chat_text(**{name: exchange.body[name] for name in names}))


@scenario
def a_tool_makes_a_round_trip():
    call = {"tool_choice": {"type": "function", "function": {"name": "read"}}, "stop": []}
    with Recorder(URL, GREEDY, call, lambda body: "tools" in body) as recorder:
        finished = ask(recorder.url, "Read the file a.txt")
    equal({exchange.status for exchange in recorder.exchanges}, {200})
    conversation = with_tools(recorder.exchanges)
    assert len(conversation) > 1, finished.stdout + finished.stderr
    equal([message["role"] for message in conversation[1].body["messages"]][-2:], ["assistant", "tool"])
    assert streamed(conversation[-1]).strip() in finished.stdout, finished.stdout


@scenario
def a_wrong_key_is_reported():
    finished = ask(URL, QUESTION, WRONG_KEY)
    assert "missing or invalid API key" in finished.stdout + finished.stderr, finished.stdout + finished.stderr


run(VERSION)
