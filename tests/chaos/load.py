"""Clients with concurrent streams, whose endings are recorded in the ledger."""

import asyncio
import random
from collections.abc import Sequence
from typing import Self

from specray.bench.exchange import exchange, request_bytes
from tests.chaos.ledger import REQUEST_TIMEOUT_S, Ending, Ledger, ending_of
from tests.chaos.questions import Question

PAUSE_S = 0.1  # after a request without an answer


class Load:
    """Sends questions in `num_streams` streams until `__aexit__`, which awaits the last answers."""

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
        while not self._is_over:
            question = self._questions[number % len(self._questions)]
            number += self._num_streams
            if await ask(self._url, question, self._ledger) is not Ending.COMPLETE:
                await asyncio.sleep(PAUSE_S)


async def ask(
    url: str, question: Question, ledger: Ledger, leave_after: int | None = None, is_streamed: bool = True
) -> Ending:
    """Send one question; the client disconnects after `leave_after` bytes of the answer, if given."""
    request = request_bytes(f"{url}/v1/completions", question.body | {"stream": is_streamed})
    reply = await exchange(url, request, REQUEST_TIMEOUT_S, None if leave_after is None else len(request) + leave_after)
    ending = ending_of(reply, question.text)
    ledger.enter(ending, reply)
    return ending


async def leave_at_random(url: str, questions: Sequence[Question], count: int, seed: int, ledger: Ledger) -> None:
    """`count` concurrent clients that disconnect after a random number of bytes."""
    draw = random.Random(seed)
    points = [draw.randrange(0, 6000) for _ in range(count)]
    await asyncio.gather(*(ask(url, draw.choice(questions), ledger, point) for point in points))


async def ask_at_once(url: str, questions: Sequence[Question], count: int, ledger: Ledger) -> None:
    """`count` requests at once."""
    await asyncio.gather(*(ask(url, questions[i % len(questions)], ledger) for i in range(count)))
