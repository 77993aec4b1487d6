"""The ingress's side of its router: one long-lived stream in, submits and aborts out.

What lives here: which answer belongs to which request, deadlines, and what happens when the router goes
away: every request in flight ends in an explicit error, then the stream is opened again. Not here: HTTP
(`openai`), Ray (the `RouterPort` is a Serve handle in `ingress`, a plain object in tests).
"""

import asyncio
import contextlib
import contextvars
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from cluster.connections import Item, Refusal, RouterInfo
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, SpecRayError
from specray.metrics import Snapshot
from specray.outputs import FinishReason, RequestOutput

RECONNECT_S = 0.2
NOT_READY = "the engine is starting or restarting; try again in a few seconds"
LOST = "the engine stopped while it worked on this request; send it again"

logger = logging.getLogger(__name__)


class RouterPort(Protocol):
    """What an ingress asks of a Router."""

    def outputs(self, connection_id: str) -> AsyncIterator[Item]: ...

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def renew(self, connection_id: str) -> bool: ...

    async def stats(self) -> Snapshot: ...


class RequestRefusedError(SpecRayError):
    """The router refused a request; `status` and `param` are its."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.status = refusal.status
        self.param = refusal.param


class RequestFailedError(SpecRayError):
    """The engine ended one request with an error."""


class DeadlineError(SpecRayError):
    """A request took longer than it may."""

    status = 504


class Job:
    """Requests submitted together; iterate `outputs`, and `close` however that ends."""

    def __init__(self, client: "RouterClient", request_ids: Sequence[str], timeout_s: float) -> None:
        self._client = client
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._unfinished = set(request_ids)
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._news: asyncio.Queue[RequestOutput | SpecRayError] = asyncio.Queue()

    def put(self, news: RequestOutput | SpecRayError) -> None:
        self._news.put_nowait(news)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the request, its news) until each has finished. Raises a SpecRayError when one cannot."""
        while self._unfinished:
            output = await self._next()
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise RequestFailedError(f"the engine gave this request up: {output.error or output.finish_reason}")
            yield self._index[output.request_id], output

    def close(self) -> None:
        """Abort what has not finished. May be called twice."""
        self._client.forget(self._index, abort=self._unfinished)
        self._unfinished = set()

    async def _next(self) -> RequestOutput:
        try:
            async with asyncio.timeout_at(self._deadline):
                news = await self._news.get()
        except TimeoutError:
            raise DeadlineError(
                f"the request took longer than {self._timeout_s:g} s; ask for fewer tokens or a longer timeout"
            ) from None
        if isinstance(news, SpecRayError):  # the router is gone, and our requests with it
            self._unfinished = set()
            raise news
        return news


class RouterClient:
    """One ingress replica's connection; construct it inside the event loop, then `start` it."""

    def __init__(self, port: RouterPort, lease_s: float) -> None:
        self.info: RouterInfo | None = None  # of the connected router; None while there is none
        self._port = port
        self._lease_s = lease_s
        self._connection_id = ""
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Serve cancels calls made in a request's context when its client leaves; ours outlive the request.
        self._context = contextvars.copy_context()

    def start(self) -> None:
        self._spawn(self._stay_connected())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, requests: list[EngineRequest], timeout_s: float) -> Job:
        """Start requests, all or none. Raises RequestRefusedError or EngineDeadError."""
        if self.info is None:
            raise EngineDeadError(NOT_READY)
        request_ids = [request.request_id for request in requests]
        job = Job(self, request_ids, timeout_s)
        self._jobs.update(dict.fromkeys(request_ids, job))
        call = self._spawn(self._submit(requests))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            self.forget(request_ids, abort=request_ids, after=call)
            raise
        except SpecRayError:
            self.forget(request_ids)
            raise
        return job

    def forget(
        self, request_ids: Iterable[str], abort: Collection[str] = (), after: asyncio.Task[None] | None = None
    ) -> None:
        """Expect no more news of requests, and abort some of them once `after` is through."""
        for request_id in request_ids:
            self._jobs.pop(request_id, None)
        if abort:
            self._spawn(self._abort(list(abort), after))

    async def stats(self) -> Snapshot:
        if self.info is None:
            raise EngineDeadError(NOT_READY)
        return await self._port.stats()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it has it, too; asyncio need not report it again

    async def _submit(self, requests: list[EngineRequest]) -> None:
        try:
            refusal = await self._port.submit(self._connection_id, requests)
        except Exception as error:
            logger.warning("submit failed: %s", _first_line(error))
            raise EngineDeadError(NOT_READY) from error
        if refusal is not None:
            raise RequestRefusedError(refusal)

    async def _abort(self, request_ids: list[str], after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(Exception):  # a dead router has nothing left to abort
            await self._port.abort(request_ids)

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._connect()
            except Exception as error:
                if self.info is not None:
                    logger.warning("lost the router: %s", _first_line(error))
            self._disconnected()
            await asyncio.sleep(RECONNECT_S)

    async def _connect(self) -> None:
        """Take news from a new connection until it breaks or falls silent."""
        self._connection_id = uuid.uuid4().hex
        pump = self._spawn(self._pump())
        lease = self._spawn(self._renew())
        try:
            await asyncio.wait([pump, lease], return_when=asyncio.FIRST_COMPLETED)
            await (pump if pump.done() else lease)
        finally:
            pump.cancel()
            lease.cancel()

    async def _pump(self) -> None:
        async for item in self._port.outputs(self._connection_id):
            if isinstance(item, RouterInfo):
                self.info = item
                logger.info("connected to the router: %s", item)
            else:
                self._dispatch(item)

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is not None:
                job.put(output)

    async def _renew(self) -> None:
        """Tell the router that we live, and find out whether it does."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if self.info is None:
                continue
            async with asyncio.timeout(self._lease_s):
                if not await self._port.renew(self._connection_id):
                    raise EngineDeadError("the router does not know this connection any more")

    def _disconnected(self) -> None:
        self.info = None
        lost, self._jobs = self._jobs, {}
        for job in set(lost.values()):
            job.put(EngineDeadError(LOST))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
