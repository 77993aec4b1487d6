"""Long prompts: refused before they are tokenized, tokenized beside the event loop, and not at other tenants' cost."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import specray.server.tokenization
from specray.server.completions.protocol import CompletionRequest
from specray.server.schemas.prompts import checked_token_ids
from specray.server.tokenization import NUM_THREADS, THREADS_PER_TENANT, TextPool
from tests.support.scripted_server import Serve

CONTEXT = 512  # of the scripted ranks


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(serve: Serve) -> None:
    """A megabyte of special tokens in a message took seconds, with the interpreter lock held."""

    async def scenario() -> None:
        async with serve() as server:
            long = "<|end|>" * 190_000
            bodies = {
                "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
                "/v1/completions": {"prompt": long},
                "/generate": {"input_ids": [0] * 500_000},
            }
            for path, body in bodies.items():
                start = time.thread_time()
                reply = await server.http.post(path, json=body)
                assert reply.status_code == 400, reply.text
                assert str(CONTEXT) in reply.json()["error"]["message"]
                assert len(reply.content) < 1000
                assert time.thread_time() - start < 0.5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi" * 600}], "truncate_prompt_tokens": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi" * 600}], "truncate_prompt_tokens": -1}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_the_servers_max_tokens_end_with_the_context(serve: Serve, path: str, body: dict[str, Any]) -> None:
    """A client that sets no limit is not told that its limit is too large."""

    async def scenario() -> None:
        async with serve(server={"default_max_tokens": CONTEXT}) as server:
            reply = await server.http.post(path, json=body)
            assert reply.status_code == 200, reply.text

    asyncio.run(scenario())


OVERFLOWS = {  # characters of a prompt, max_tokens
    "characters": (100_000, 1),
    "tokens": (CONTEXT + 10, 1),
    "max_tokens": (10, CONTEXT),
}


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_has_the_code_and_the_words_that_agents_look_for(serve: Serve, overflow: str, stream: bool) -> None:
    async def scenario() -> None:
        length, max_tokens = OVERFLOWS[overflow]
        text = "a" * length
        async with serve() as server:
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens},
                "/v1/completions": {"prompt": text, "max_tokens": max_tokens},
                "/v1/responses": {"input": text, "max_output_tokens": max_tokens},
                "/generate": {"text": text, "sampling_params": {"max_new_tokens": max_tokens}},
            }
            for path, body in bodies.items():
                reply = await server.http.post(path, json=body | {"stream": stream})
                assert reply.status_code == 400, path
                error = reply.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("overflow", "words"),
    [
        ("characters", rf"prompt is too long: \d+ tokens > {CONTEXT} maximum"),
        ("tokens", rf"prompt is too long: 5\d\d tokens > {CONTEXT} maximum"),
        (
            "max_tokens",
            rf"input length and `max_tokens` exceed context limit: \d+ \+ {CONTEXT} > {CONTEXT}, .*",
        ),
    ],
)
def test_claude_code_gets_an_overflow_in_anthropics_words(serve: Serve, overflow: str, words: str) -> None:
    async def scenario() -> None:
        length, max_tokens = OVERFLOWS[overflow]
        body = {"model": "toy", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "a" * length}]}
        async with serve() as server:
            reply = await server.http.post("/v1/messages", json=body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
            assert re.fullmatch(words, reply.json()["error"]["message"]), reply.text

    asyncio.run(scenario())


def test_the_longest_prompt_is_accepted(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = {"prompt": "a" * (CONTEXT - 1), "max_tokens": 1}
            assert (await server.http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(scenario())


class Unread(list[int]):
    """Token ids that must not be looked at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read")


def test_token_ids_are_not_looked_at_on_the_event_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body holds a million of them, and a loop in Python over these took 50 ms."""
    assert CompletionRequest(prompt=Unread([1, 2])).prompt.items[0] == [1, 2]  # type: ignore[arg-type]
    checked: list[tuple[int, bool]] = []

    def record(values: list[int], field: str) -> list[int]:
        checked.append((len(values), threading.current_thread() is threading.main_thread()))
        return checked_token_ids(values, field)

    monkeypatch.setattr(specray.server.tokenization, "checked_token_ids", record)

    async def scenario() -> None:
        async with serve() as server:
            for prompt, status in (
                ([1] * 900_000, 400),
                ([1] * 9, 200),
                ([1] * 8 + [-1], 400),
                ([1] * 7 + [True], 400),
            ):
                for path, field in (
                    ("/v1/completions", "prompt"),
                    ("/generate", "input_ids"),
                    ("/detokenize", "tokens"),
                ):
                    reply = await server.http.post(path, json={field: prompt})
                    assert reply.status_code == status, reply.text
                    if status == 400:
                        assert reply.json()["error"]["param"] == field

    asyncio.run(scenario())
    assert {length for length, _ in checked} == {8, 9}  # the long prompt was refused by its length
    assert not any(is_main for _, is_main in checked)


def test_one_tenants_texts_leave_threads_to_others() -> None:
    async def scenario() -> None:
        pool, release = TextPool(), threading.Event()
        running: list[str] = []

        def work(name: str) -> str:
            running.append(name)
            release.wait(10.0)
            return name

        heavy = [asyncio.create_task(pool.run("heavy", work, "heavy")) for _ in range(3 * NUM_THREADS)]
        light = [asyncio.create_task(pool.run(name, work, name)) for name in ("a", "b")]
        while len(running) < NUM_THREADS:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert sorted(running) == ["a", "b", *["heavy"] * THREADS_PER_TENANT]
        release.set()
        assert await asyncio.gather(*light) == ["a", "b"]
        assert await asyncio.gather(*heavy) == ["heavy"] * (3 * NUM_THREADS)

    asyncio.run(scenario())
