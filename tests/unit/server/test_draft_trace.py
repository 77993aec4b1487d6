"""The field `trace` of streams: sent to requests that ask for it, with texts that add up to the reply."""

import asyncio
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.draft_trace import DraftTrace, TracedStep, VerifiedTree
from specray.server.draft_trace import MAX_NODE_TEXT, trace_fields
from specray.server.tokenization import TokenText
from tests.support.scripted_server import Serve, Server
from tests.unit.server.test_server import assert_error, data_lines

NGRAM = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3).model_dump()
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 5}
PROMPT = {"prompt": "hi", "max_tokens": 60, "seed": 5}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT}


async def stream(server: Server, path: str, speculative: dict[str, Any] | None, **more: Any) -> list[dict[str, Any]]:
    """The choices of all chunks. The last one has the usage instead."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "speculative": speculative}
    reply = await server.http.post(path, json=BODIES[path] | options | more)
    assert reply.status_code == 200, reply.text
    *chunks, done = data_lines(reply.text)
    assert done == "[DONE]", done
    return [chunk["choices"][0] if chunk["choices"] else chunk for chunk in chunks]


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice.get("text", "") for choice in choices
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_trace_adds_up_to_the_text_and_the_counters(serve: Serve, path: str) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM) as server:
            plain, traced = await stream(server, path, None), await stream(server, path, {"trace": True})
            assert text_of(traced) == text_of(plain)
            usage = traced[-1]["usage"]["speculative"]
            traces = [choice["trace"] for choice in traced if "trace" in choice]
            tokens = [token for trace in traces for token in trace["tokens"]]
            steps = [step for trace in traces for step in trace["steps"]]
            assert "".join(token["text"] for token in tokens) == text_of(plain)
            assert sorted({token["index"] for token in tokens}) == list(range(60))
            assert len(steps) - 1 == usage["verify_steps"]
            assert sum(len(step["accepted"]) for step in steps[1:]) == usage["accepted_tokens"]
            depths = {token["index"]: token["depth"] for token in tokens}
            for step in steps[1:-1]:
                assert len(step["tokens"]) == len(step["parents"]) == 4
                assert [depths[step["index"] + place] for place in range(3)] == [1, 2, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize("speculative", [None, {"trace": False}, {"trace": None}, {"enabled": True}])
def test_other_streams_have_no_trace(serve: Serve, speculative: dict[str, Any] | None) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM) as server:
            for path in BODIES:
                assert all("trace" not in choice for choice in await stream(server, path, speculative))

    asyncio.run(scenario())


@pytest.mark.parametrize("is_speculating", [False, True])
def test_without_drafts_every_token_is_the_targets_own(serve: Serve, is_speculating: bool) -> None:
    async def scenario() -> None:
        async with serve(**({"speculative": NGRAM} if is_speculating else {})) as server:
            choices = await stream(server, "/v1/chat/completions", {"trace": True, "enabled": False})
            traces = [choice["trace"] for choice in choices if "trace" in choice]
            assert {token["depth"] for trace in traces for token in trace["tokens"]} == {0}
            assert {len(step["tokens"]) for trace in traces for step in trace["steps"]} == {1}

    asyncio.run(scenario())


def test_text_that_may_be_a_stop_string_is_traced_when_it_is_sent(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM, server={"stream_interval_ms": 0.0}) as server:
            choices = await stream(server, "/v1/completions", {"trace": True}, stop=["brown fox jumps"])
            for choice in choices[:-2]:
                assert "".join(token["text"] for token in choice["trace"]["tokens"]) == choice["text"]
            depths = {token["index"]: token["depth"] for choice in choices[:-2] for token in choice["trace"]["tokens"]}
            assert depths == {index: (1, 2, 0)[index % 3] for index in range(60)}

    asyncio.run(scenario())


def test_a_stream_that_fails_over_is_traced_to_its_end(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(speculative=NGRAM, num_replicas=2, step_s=0.01) as server:
            waiting = asyncio.create_task(stream(server, "/v1/completions", {"trace": True}))
            await server.until(lambda: any(replica.ranks.num_steps > 5 for replica in server.replicas))
            next(replica for replica in server.replicas if replica.ranks.num_steps > 5).kill()
            tokens = [token for choice in await waiting if "trace" in choice for token in choice["trace"]["tokens"]]
            assert server.router_pool.num_failovers == 1
            assert sorted({token["index"] for token in tokens}) == list(range(60))

    asyncio.run(scenario())


@pytest.mark.parametrize("more", [{"stream": False}, {"stream": True, "n": 2}])
def test_a_trace_needs_a_stream_of_one_choice(serve: Serve, more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve() as server:
            for path, body in BODIES.items():
                reply = await server.http.post(path, json=body | more | {"speculative": {"trace": True}})
                assert_error(reply, 400, param="speculative.trace")
            for path, prompt in (("/generate", "text"), ("/v1/responses", "input")):
                body = {prompt: "hi", "stream": True, "speculative": {"trace": True}}
                assert_error(await server.http.post(path, json=body), 400, param="speculative.trace")

    asyncio.run(scenario())


def test_the_text_of_a_node_is_bounded() -> None:
    step = TracedStep(0, VerifiedTree([7, 8], [-1, 0]), [])
    fields = trace_fields(DraftTrace([], [step]), lambda token_id: TokenText("x" * token_id * 10, b""))
    assert [len(text) for text in fields["trace"]["steps"][0]["tokens"]] == [MAX_NODE_TEXT] * 2
