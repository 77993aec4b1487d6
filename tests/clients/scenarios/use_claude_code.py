"""Claude Code, headless, over /v1/messages: an answer, a tool's round trip, a further turn, and errors."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from recorder import Exchange, Recorder, run_program
from report import KEY, MODEL, QUESTION, URL, WRONG_KEY, equal, post, run, scenario

MODULES = Path.cwd() / "node_modules"
HOME = Path(tempfile.mkdtemp(prefix="claude-code-"))
GREEDY = {"temperature": 0, "stop_sequences": ["."]}  # one short sentence
VERSION: str = json.loads((MODULES / "@anthropic-ai/claude-code/package.json").read_text())["version"]
SYSTEM = "You are a coding assistant."


def ask(url: str, *arguments: str, key: str = KEY, max_tokens: int = 512) -> subprocess.CompletedProcess[str]:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    command = ["claude", "--print", "--tools", "Read", "--system-prompt", SYSTEM, *arguments]
    return run_program(command, HOME, variables)


def streamed(exchange: Exchange) -> str:
    deltas = [event["delta"] for event in exchange.events if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def own_answer(exchange: Exchange) -> str:
    """The server's answer to the same request without Claude Code and without a stream."""
    blocks: list[dict[str, Any]] = post("/v1/messages", **exchange.body | {"stream": False})["content"]
    return "".join(block.get("text", "") for block in blocks)


@scenario
def an_answer_is_the_servers_text():
    with Recorder(URL, GREEDY) as recorder:
        finished = ask(recorder.url, QUESTION)
    equal([exchange.status for exchange in recorder.exchanges], [200])
    [exchange] = recorder.exchanges
    equal(exchange.path, "/v1/messages?beta=true")
    assert {"context_management", "thinking"} <= exchange.body.keys(), exchange.body.keys()
    assert "system" in [message["role"] for message in exchange.body["messages"]]
    assert finished.stdout.strip(), finished.stderr
    equal(finished.stdout.strip(), streamed(exchange).strip())
    equal(streamed(exchange), own_answer(exchange))


@scenario
def a_tool_makes_a_round_trip():
    call = {"tool_choice": {"type": "tool", "name": "Read"}, "stop_sequences": []}
    with Recorder(URL, GREEDY, call) as recorder:
        finished = ask(recorder.url, "Read the file /etc/hostname")
    statuses = [exchange.status for exchange in recorder.exchanges]
    assert len(statuses) > 1, finished.stderr
    equal(set(statuses), {200})
    blocks = [
        block
        for message in recorder.exchanges[1].body["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
    ]
    kinds = [block["type"] for block in blocks]
    assert {"tool_use", "tool_result"} <= set(kinds), kinds
    equal(finished.stdout.strip(), streamed(recorder.exchanges[-1]).strip())


@scenario
def a_conversation_is_continued():
    with Recorder(URL, GREEDY) as recorder:
        first = ask(recorder.url, QUESTION)
        second = ask(recorder.url, "--continue", "And of Italy?")
    assert first.stdout.strip(), first.stderr
    assert second.stdout.strip(), second.stderr
    equal({exchange.status for exchange in recorder.exchanges}, {200})
    turns = [message["role"] for message in recorder.exchanges[-1].body["messages"]]
    equal([turns.count("assistant"), turns.count("user")], [1, 2])


@scenario
def too_many_tokens_are_reported_in_its_words():
    finished = ask(URL, "word " * 9000)
    assert "prompt is too long" in (finished.stdout + finished.stderr).lower(), finished.stdout


@scenario
def a_wrong_key_is_an_authentication_error():
    finished = ask(URL, QUESTION, key=WRONG_KEY)
    assert finished.returncode != 0
    assert "401" in finished.stdout + finished.stderr, finished.stdout


run(VERSION)
