"""benchmarks.long_prompts: a server that does not keep up is named in one sentence."""

import asyncio
import random

import httpx
import pytest

from benchmarks import long_prompts


def client_of(answer: httpx.MockTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=answer, base_url="http://test")


async def never(_: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_server_that_does_not_keep_up_ends_the_benchmark() -> None:
    async def scenario() -> None:
        async with client_of(httpx.MockTransport(never)) as client:
            await long_prompts._send_long_prompts(client, random.Random(0), 0.01)

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scenario())
    assert long_prompts._first(raised.value).startswith("4 long prompts are unfinished")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(503, text="no engine"), "a request got status 503: no engine"),
        (httpx.ReadTimeout(""), "no answer within 120 s; run it on an idle machine, or raise --every"),
    ],
)
def test_an_error_is_one_line(answer: httpx.Response | httpx.ReadTimeout, message: str) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, httpx.ReadTimeout):
            raise answer
        return answer

    async def scenario() -> None:
        async with client_of(httpx.MockTransport(handle)) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(long_prompts._ask(client, 1.0, long_prompts.Phase([], [])))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scenario())
    assert long_prompts._first(raised.value) == message
