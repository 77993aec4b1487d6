"""Checks that a request's grammar can be compiled, in a separate process and under limits.

The process starts with the first request that has a grammar, because it takes some hundred megabytes.
"""

import asyncio
import contextlib
import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import NamedTuple

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.server.errors import ApiError
from specray.server.tasks import Tasks

REPLY_TIMEOUT_S = 60.0
MAX_AT_ONCE = 2  # grammars that are compiled at the same time; a tenant has at most one of them
MAX_KNOWN = 4096  # outcomes that are kept
MAX_TRIES = 2  # of one grammar, each with a process of its own
Replies = dict[int, "asyncio.Future[str | None]"]  # by the number of the question
UNAVAILABLE = "the process that compiles grammars has ended; send the request again"


class _ProcessEndedError(Exception):
    """The process ended before it had answered."""


class _Running(NamedTuple):
    process: asyncio.subprocess.Process
    replies: Replies  # that are expected of it


def check_command(folder: str, vocab_size: int, eos_token_ids: Sequence[int]) -> list[str]:
    """The command line of the process."""
    module = "specray.structured_output.compile_check"
    return [sys.executable, "-P", "-m", module, folder, str(vocab_size), *map(str, eos_token_ids)]


class GrammarCheck:
    """Outcomes by grammar, and the process that finds them. Used in one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._tenants: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._started: asyncio.Task[_Running] | None = None
        self._numbers = count()
        self._tasks = Tasks()

    async def check(self, spec: GrammarSpec, tenant: str, command: Sequence[str]) -> None:
        """InvalidRequestError if the grammar cannot be compiled; `command` starts the process if there is none."""
        key = sha256(f"{spec.kind}\n{spec.text}".encode()).digest()
        if key not in self._known:
            async with self._tenants[tenant], self._free:
                self._known[key] = await self._ask(spec, command)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if (error := self._known[key]) is not None:
            raise InvalidRequestError(error, "grammar")

    async def close(self) -> None:
        if self._started is not None:
            self._started.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                running = await self._started
                _kill(running.process)
                await running.process.wait()
        await self._tasks.close()

    async def _ask(self, spec: GrammarSpec, command: Sequence[str]) -> str | None:
        """The outcome. A process that ends meanwhile, killed for its memory for example, is replaced once."""
        for _ in range(MAX_TRIES):
            try:
                return await self._ask_once(spec, await self._running(command))
            except _ProcessEndedError:
                continue
        raise ApiError(503, UNAVAILABLE)

    async def _ask_once(self, spec: GrammarSpec, running: _Running) -> str | None:
        process, replies = running
        assert process.stdin is not None
        number = next(self._numbers)
        reply: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        replies[number] = reply
        try:
            process.stdin.write(json.dumps((number, spec)).encode() + b"\n")
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                return await reply
        except (TimeoutError, ConnectionError):
            _kill(process)
            raise _ProcessEndedError from None
        finally:
            del replies[number]

    async def _running(self, command: Sequence[str]) -> _Running:
        """The process, which is started if there is none.

        It goes on starting when the request that started it has gone: on a busy machine that takes long, and those that
        come meanwhile wait for the same one.
        """
        if self._started is None or _has_ended(self._started):
            self._started = asyncio.get_running_loop().create_task(self._start(command))
            self._started.add_done_callback(_retrieve)
        return await asyncio.shield(self._started)

    async def _start(self, command: Sequence[str]) -> _Running:
        """A new process, when it is ready. However long that takes: a request has its own time limit."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except asyncio.CancelledError:
            _kill(process)
            await process.wait()
            raise
        if line.strip() != b"ready":
            _kill(process)
            raise ApiError(503, "the process that compiles grammars did not start; see the server's log")
        running = _Running(process, {})
        self._tasks.spawn(_receive(running))
        return running


async def _receive(running: _Running) -> None:
    """Pass replies on until the process ends; then fail those that wait."""
    process, replies = running
    assert process.stdout is not None
    while line := await process.stdout.readline():
        number, error = json.loads(line)
        if (reply := replies.get(number)) is not None and not reply.done():
            reply.set_result(error)
    await process.wait()
    for reply in replies.values():
        if not reply.done():
            reply.set_exception(_ProcessEndedError())


def _has_ended(started: asyncio.Task[_Running]) -> bool:
    if not started.done():
        return False
    return started.cancelled() or started.exception() is not None or started.result().process.returncode is not None


def _retrieve(started: asyncio.Task[_Running]) -> None:
    """asyncio logs exceptions that nobody asked for, as when all requests have gone."""
    if not started.cancelled():
        started.exception()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
