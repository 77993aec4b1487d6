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

from cluster.api.errors import ApiError
from cluster.tasks import Tasks
from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec

START_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 20.0
MAX_AT_ONCE = 2  # grammars that are compiled at the same time; a tenant has at most one of them
MAX_KNOWN = 4096  # outcomes that are kept
Replies = dict[int, "asyncio.Future[str | None]"]  # by the number of the question
UNAVAILABLE = "the process that compiles grammars has ended; send the request again"


def check_command(folder: str, vocab_size: int, eos_token_ids: Sequence[int]) -> list[str]:
    """The command line of the process."""
    module = "specray.structured_output.compile_check"
    return [sys.executable, "-m", module, folder, str(vocab_size), *map(str, eos_token_ids)]


class GrammarCheck:
    """Outcomes by grammar, and the process that finds them. Used in one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._tenants: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._replies: Replies = {}
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
        if self._process is not None:
            _kill(self._process)
            await self._process.wait()
        await self._tasks.close()

    async def _ask(self, spec: GrammarSpec, command: Sequence[str]) -> str | None:
        process, replies = await self._running(command)
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
            raise ApiError(503, UNAVAILABLE) from None
        finally:
            del replies[number]

    async def _running(self, command: Sequence[str]) -> tuple[asyncio.subprocess.Process, Replies]:
        """The process and the replies that are expected of it; it is started if there is none."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
                await self._wait_until_ready(process)
                self._process, self._replies = process, {}
                self._tasks.spawn(_receive(process, self._replies))
            return self._process, self._replies

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if line.strip() != b"ready":
            _kill(process)
            raise ApiError(503, "the process that compiles grammars did not start; see the server's log")


async def _receive(process: asyncio.subprocess.Process, replies: Replies) -> None:
    """Pass replies on until the process ends; then fail those that wait."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        number, error = json.loads(line)
        if (reply := replies.get(number)) is not None and not reply.done():
            reply.set_result(error)
    await process.wait()
    for reply in replies.values():
        if not reply.done():
            reply.set_exception(ApiError(503, UNAVAILABLE))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
