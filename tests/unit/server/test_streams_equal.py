"""A stream adds up to the complete reply, whatever the options are: random requests, each sent both ways.

SPECRAY_STREAM_PAIRS sets the number of requests; 5000 take some minutes.
"""

import asyncio
import json
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.support.scripted_server import Serve, Server

NUM_PAIRS = int(os.environ.get("SPECRAY_STREAM_PAIRS", "400"))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
# What the ranks generate, over and over.
OUTPUTS = ["The quick brown fox, é 🎉 and so on. ", f"Well. {CALL} ", "é🎉" * 3]
TOOL = {"name": "add", "parameters": {"type": "object"}}
STOPS = ["fox", " ", "é", "🎉", "k b", "zz", "</tool", "Well. <"]

Json = dict[str, Any]


def options(random: Random, **own: list[Any]) -> Json:
    """Random values of some of these options; their defaults otherwise."""
    common: dict[str, list[Any]] = {
        "temperature": [0, 0.7],
        "stop": [random.sample(STOPS, random.randint(1, 8))],
        "stop_token_ids": [[101], [32]],
        "skip_special_tokens": [False],
    }
    return {name: random.choice(values) for name, values in (common | own).items() if random.random() < 0.35}


def chat(random: Random) -> tuple[str, Json]:
    own = options(random, n=[2, 3], min_tokens=[4, 9], tools=[[{"type": "function", "function": TOOL}]])
    if random.random() < 0.5:
        own |= {"logprobs": True, "top_logprobs": random.randint(0, 2)}
    message = {"role": "user", "content": "hi"}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": random.randint(0, 90), **own}


def text(random: Random) -> tuple[str, Json]:
    prompts: list[Any] = ["a", ["a", "bc"], [1, 2, 3], [[1], [2, 3]]]
    own = options(random, n=[2], echo=[True], logprobs=[0, 1, 2], include_stop_str_in_output=[True])
    return "/v1/completions", {"prompt": random.choice(prompts), "max_tokens": random.randint(0, 60), **own}


def generate(random: Random) -> tuple[str, Json]:
    sampling = options(random, n=[2], no_stop_trim=[True]) | {
        "max_new_tokens": random.randint(0, 60),
        "sampling_seed": 3,
    }
    own = {"return_logprob": True, "logprob_start_len": random.choice([-1, 0, 1])} if random.random() < 0.5 else {}
    return "/generate", {"text": random.choice(["ab", ["ab", "c"]]), "sampling_params": sampling, **own}


def response(random: Random) -> tuple[str, Json]:
    own = options(random, tools=[[{"type": "function", **TOOL}]], top_logprobs=[1, 2])
    return "/v1/responses", {"input": "hi", "max_output_tokens": random.randint(0, 90), **own}


async def both_ways(server: Server, path: str, body: Json) -> tuple[Any, list[Any]]:
    """The complete reply, and the events of the stream."""
    whole = await server.http.post(path, json=body)
    assert whole.status_code == 200, (body, whole.text)
    stream = await server.http.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n") if line.startswith("data: ")]
    return whole.json(), [json.loads(line) for line in lines if line != "[DONE]"]


def check_choices(whole: Any, events: list[Any]) -> None:
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        joined: Json = {"text": "", "reasoning": "", "logprobs": None, "calls": {}, "finish_reason": None}
        for part in parts:
            delta = part.get("delta", {})
            joined["text"] += part.get("text", "") + (delta.get("content") or "")
            joined["reasoning"] += delta.get("reasoning_content") or ""
            joined["finish_reason"] = part["finish_reason"] or joined["finish_reason"]
            for call in delta.get("tool_calls", []):
                joined["calls"][call["index"]] = joined["calls"].get(call["index"], "") + call["function"]["arguments"]
            for name, entries in (part["logprobs"] or {}).items():
                joined["logprobs"] = joined["logprobs"] or {}
                before = joined["logprobs"].get(name)
                joined["logprobs"][name] = (before or []) + entries if isinstance(entries, list) else entries
        message = choice.get("message", {})
        assert joined["text"] == choice.get("text", message.get("content") or "")
        assert joined["reasoning"] == (message.get("reasoning_content") or "")
        assert joined["finish_reason"] == choice["finish_reason"]
        assert [*joined["calls"].values()] == [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        if any((joined["logprobs"] or {}).values()) or any((choice["logprobs"] or {}).values()):
            assert joined["logprobs"] == choice["logprobs"]


def check_generated(whole: Any, events: list[Any]) -> None:
    replies = whole if isinstance(whole, list) else [whole]
    for index, reply in enumerate(replies):
        last = [event for event in events if event.get("index", 0) == index][-1]
        for shown in (last, reply):
            for name in ("id", "e2e_latency", "cached_tokens", "spec_verify_ct"):
                del shown["meta_info"][name]
        assert {name: value for name, value in last.items() if name != "index"} == reply


def check_response(whole: Any, events: list[Any]) -> None:
    last = events[-1]["response"]
    for shown in (last, whole):
        for name in ("id", "created_at", "completed_at", "seed", "usage"):
            del shown[name]
        for item in shown["output"]:
            item.pop("id"), item.pop("call_id", None)
    assert last == whole
    for index, item in enumerate(whole["output"]):
        deltas = [e["delta"] for e in events if e.get("output_index") == index and e["type"].endswith(".delta")]
        assert "".join(deltas) == item.get("arguments", item.get("content", [{"text": None}])[0]["text"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


KINDS: dict[str, tuple[Callable[[Random], tuple[str, Json]], Callable[[Any, list[Any]], None]]] = {
    "chat": (chat, check_choices),
    "text": (text, check_choices),
    "generate": (generate, check_generated),
    "response": (response, check_response),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_adds_up_to_the_complete_reply(serve: Serve, kind: str) -> None:
    make, check = KINDS[kind]

    async def run() -> None:
        random = Random(kind)
        async with serve(longest=1024, disable_radix_cache=True) as server:
            for _ in range(NUM_PAIRS // len(KINDS)):
                server.ranks.script = server.ranks.tokenizer.encode(random.choice(OUTPUTS))
                path, body = make(random)
                check(*await both_ways(server, path, body | ({} if kind == "generate" else {"seed": 5})))

    asyncio.run(run())
