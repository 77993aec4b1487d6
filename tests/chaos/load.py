"""Clients: so many streams at once, each followed to its end and entered in the ledger.

Not here: what may end how (`faults`), what is right (`questions`).
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

import httpx

from tests.chaos.ledger import Ending, Ledger
from tests.chaos.questions import Question

PATIENCE_S = 90.0  # a request that has not ended by then never will
REFUSALS = (429, 503)
PAUSE_S = 0.1  # after anything but an answer


class Load:
    """Asks questions on `num_streams` connections from `__aenter__` until `__aexit__`, which awaits the last answer."""

    def __init__(self, url: str, questions: Sequence[Question], num_streams: int, ledger: Ledger) -> None:
        self._url = url
        self._questions = questions
        self._num_streams = num_streams
        self._ledger = ledger
        self._is_over = False
        self._streams: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._streams = [asyncio.create_task(self._ask_on(number)) for number in range(self._num_streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._streams)

    async def _ask_on(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as client:
            while not self._is_over:
                question = self._questions[number % len(self._questions)]
                number += self._num_streams
                if await ask(client, question, self._ledger) is not Ending.COMPLETE:
                    await asyncio.sleep(PAUSE_S)


async def ask(client: httpx.AsyncClient, question: Question, ledger: Ledger, leave_after: int | None = None) -> Ending:
    """One question, streamed; a client that leaves does so behind `leave_after` bytes of the answer."""
    watch = _Watch()
    try:
        async with asyncio.timeout(PATIENCE_S):
            ending = await _follow(client, question, watch, leave_after)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        ending = Ending.REFUSED
    except httpx.TransportError:
        ending = Ending.CUT
    except TimeoutError:
        ending = Ending.LOST
    ledger.enter(ending, watch.longest)
    return ending


async def leave_at_random(url: str, questions: Sequence[Question], count: int, seed: int, ledger: Ledger) -> None:
    """So many clients at a time that go away at any byte, some before the first one."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=count)) as client:
        points = [draw.randrange(0, 6000) for _ in range(count)]
        await asyncio.gather(*(ask(client, draw.choice(questions), ledger, point) for point in points))


async def ask_at_once(url: str, questions: Sequence[Question], count: int, ledger: Ledger) -> None:
    """A flood."""
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=count)) as client:
        await asyncio.gather(*(ask(client, questions[i % len(questions)], ledger) for i in range(count)))


class _Watch:
    """The longest silence between two pieces of a stream."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: float | None = None

    def tick(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now


async def _follow(client: httpx.AsyncClient, question: Question, watch: _Watch, leave_after: int | None) -> Ending:
    async with client.stream("POST", "/v1/completions", json=question.body | {"stream": True}) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return _refused(reply)
        text = ""
        async for data in _events(reply, watch):
            if leave_after is not None and reply.num_bytes_downloaded >= leave_after:
                return Ending.LEFT
            if data == "[DONE]":
                return Ending.COMPLETE if text == question.text else Ending.WRONG
            event = json.loads(data)
            if "error" in event:
                return Ending.FAILED
            text += "".join(choice["text"] for choice in event["choices"])
    return Ending.LOST


async def _events(reply: httpx.Response, watch: _Watch) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            watch.tick()
            yield line.removeprefix("data: ")


def _refused(reply: httpx.Response) -> Ending:
    """An error that is not one of ours, such as a proxy's, tells its client nothing."""
    try:
        is_ours = set(reply.json()["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return Ending.LOST
    if not is_ours:
        return Ending.LOST
    return Ending.REFUSED if reply.status_code in REFUSALS else Ending.FAILED
