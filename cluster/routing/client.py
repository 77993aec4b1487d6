"""The ingress's side of one router: a long-lived stream in, submits and aborts out, and whether it is still there.

A client lives as long as one life of its router. Silence is death: a frozen router, or one behind a cut link, says
nothing, and its pulse is missed within seconds; whatever it says later nobody hears. Not here: what becomes of requests
whose router is lost (`router_pool`), HTTP (`api`), Ray (`RouterHandle` is a Serve handle, or a plain object in tests).
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from math import inf
from typing import Any, NoReturn, Protocol

from cluster.engine.connections import DesiredDrafter, Item, Refusal, RouterHeartbeat, RouterInfo
from cluster.routing.policy import ReplicaState
from cluster.tasks import Tasks
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, SpecRayError
from specray.metrics import Snapshot
from specray.outputs import RequestOutput

NOT_READY = "the engine is starting or restarting; try again in a few seconds"
HEARTBEAT_TIMEOUT_S = 3.0  # without a sign of life, a router is lost
CONNECT_TIMEOUT_S = 5.0
DRAFTER_LOAD_TIMEOUT_S = 600.0  # a drafter may have to be downloaded first

logger = logging.getLogger("ray.serve")


class RouterHandle(Protocol):
    """What an ingress asks of one Router."""

    def outputs(self, connection_id: str) -> AsyncIterator[Item]: ...

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def renew(self, connection_id: str, num_refused: int) -> bool: ...

    async def stats(self) -> Snapshot: ...

    async def drafter(self) -> dict[str, Any]: ...

    async def apply(self, desired: DesiredDrafter) -> Refusal | None: ...

    async def drain(self) -> None: ...


class RequestRefusedError(SpecRayError):
    """The router refused a request; `status`, `param` and `retry_after_s` are its."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.status = refusal.status
        self.param = refusal.param
        self.retry_after_s = refusal.retry_after_s


class RouterLostError(EngineDeadError):
    """The router is gone, and what it worked on with it."""


Listener = Callable[[RequestOutput | RouterLostError], None]


class RouterClient:
    """One connection with the router `replica_id`; construct it inside the event loop, then `start` it.

    `opened` is called once the router has answered, `closed` when the connection has ended and all listeners know.
    """

    def __init__(
        self,
        replica_id: str,
        handle: RouterHandle,
        lease_s: float,
        opened: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        self.replica_id = replica_id
        self.info: RouterInfo | None = None  # once connected
        self._heartbeat: RouterHeartbeat | None = None
        self._heartbeat_at = 0.0
        self._handle = handle
        self._lease_s = lease_s
        self._opened = opened
        self._closed = closed
        self._connection_id = uuid.uuid4().hex
        self._listeners: dict[str, Listener] = {}
        self._num_refused = 0  # by us, of which the router has not heard
        self._closes_when_idle = False
        self._received_at = 0.0
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()

    @property
    def state(self) -> ReplicaState:
        """What is known of the router, for routing."""
        is_alive, is_draining = self.info is not None, self._closes_when_idle
        if self._heartbeat is None:
            return ReplicaState(self.replica_id, self.num_unfinished, is_alive=is_alive, is_draining=is_draining)
        kv_usage, acceptance_length = self._heartbeat.kv_usage, self._heartbeat.acceptance_length
        return ReplicaState(self.replica_id, self.num_unfinished, kv_usage, acceptance_length, is_alive, is_draining)

    @property
    def since_token_s(self) -> float:
        """Seconds since the router's engine was last known to make a token."""
        if self.info is None or self._heartbeat is None:
            return inf
        return self._heartbeat.since_token_s + asyncio.get_running_loop().time() - self._heartbeat_at

    @property
    def refusal(self) -> Refusal | None:
        """What the router would say to a request more, if its queue is full."""
        return self._heartbeat.refusal if self._heartbeat is not None else None

    def refuse(self, refusal: Refusal) -> NoReturn:
        """Do as the router would, without asking it."""
        self._num_refused += 1
        raise RequestRefusedError(refusal)

    def close_when_idle(self) -> None:
        """Send it no new requests, and hang up once those under way are through: Serve is about to stop it."""
        self._closes_when_idle = True

    async def submit(self, requests: list[EngineRequest], listener: Listener) -> None:
        """Start requests, all or none; `listener` hears of them from now on. RequestRefusedError or RouterLostError.

        A caller that is cancelled leaves nothing behind.
        """
        request_ids = [request.request_id for request in requests]
        self._listeners.update(dict.fromkeys(request_ids, listener))
        call = self._tasks.spawn(self._submit(requests))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            self.forget(request_ids, abort=request_ids, after=call)
            raise
        except RouterLostError:
            self.forget(request_ids, abort=request_ids)  # it may have heard us all the same
            raise
        except SpecRayError:
            self.forget(request_ids)
            raise

    def forget(
        self, request_ids: Iterable[str], abort: Collection[str] = (), after: asyncio.Task[None] | None = None
    ) -> None:
        """Listen for requests no more, and abort some of them once `after` is through."""
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
        if abort:
            self._tasks.spawn(self._abort(list(abort), after))

    async def stats(self) -> Snapshot:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            return await self._handle.stats()

    @property
    def is_draining(self) -> bool:
        """Whether the router knows that the application is about to be stopped."""
        return self._heartbeat is not None and self._heartbeat.is_draining

    @property
    def num_unfinished(self) -> int:
        """Requests under way there: ours as we know them, those of other ingresses by its last pulse."""
        return len(self._listeners) + (0 if self._heartbeat is None else self._heartbeat.num_others)

    async def drain(self) -> None:
        """Have every ingress know, by way of the router, that the application is about to be stopped."""
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            await self._handle.drain()

    @property
    def desired(self) -> DesiredDrafter | None:
        """Which drafter the router has been told to have; None if it was not heard of, or cannot be told."""
        return self._heartbeat.desired if self._heartbeat is not None and self.info is not None else None

    async def drafter(self) -> dict[str, Any]:
        """What drafts there, see `drafting.drafter_report`."""
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            return await self._handle.drafter()

    async def apply(self, desired: DesiredDrafter) -> None:
        """Have the router's drafter replaced; returns when it is. RequestRefusedError or RouterLostError."""
        try:
            async with asyncio.timeout(DRAFTER_LOAD_TIMEOUT_S):
                refusal = await self._handle.apply(desired)
        except Exception as error:
            raise RouterLostError(f"replacing the drafter failed: {first_line(error)}") from error
        if refusal is not None:
            raise RequestRefusedError(refusal)

    async def _submit(self, requests: list[EngineRequest]) -> None:
        try:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                refusal = await self._handle.submit(self._connection_id, requests)
        except Exception as error:
            raise RouterLostError(f"submit failed: {first_line(error)}") from error
        if refusal is not None:
            raise RequestRefusedError(refusal)

    async def _abort(self, request_ids: list[str], after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(Exception):  # a dead router has nothing left to abort
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await self._handle.abort(request_ids)

    async def _run(self) -> None:
        """From the first sign of life to the last."""
        parts = [self._tasks.spawn(part) for part in (self._receive(), self._renew_lease(), self._watch_silence())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            error = next(part.exception() for part in parts if part.done())
            if error is None:
                logger.info("the router %s has left", self.replica_id)
            elif self.info is not None:
                logger.warning("lost the router %s: %s", self.replica_id, first_line(error))
        finally:
            for part in parts:
                part.cancel()
            self.info = None
            listeners, self._listeners = self._listeners, {}
            for listener in set(listeners.values()):
                listener(RouterLostError("the engine stopped while it worked on this request"))
            self._closed()

    async def _receive(self) -> None:
        async for item in self._handle.outputs(self._connection_id):
            self._received_at = asyncio.get_running_loop().time()
            if isinstance(item, RouterInfo):
                self.info = item
                self._opened()
                logger.info("connected to the router %s: %s", self.replica_id, item)
            elif isinstance(item, RouterHeartbeat):
                self._heartbeat, self._heartbeat_at = item, self._received_at
            else:
                self._dispatch(item)
        raise EngineDeadError("its stream ended")

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if listener := self._listeners.get(output.request_id):
                listener(output)
                if output.finish_reason is not None:
                    del self._listeners[output.request_id]

    async def _watch_silence(self) -> None:
        """Ends when the router has left, with an error when it was silent for too long."""
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S / 6)
            if self._closes_when_idle and not self._listeners:
                return
            silence = clock() - (self._received_at or started)
            if silence > (HEARTBEAT_TIMEOUT_S if self._received_at else CONNECT_TIMEOUT_S):
                raise EngineDeadError(f"not a word for {silence:.1f} s")

    async def _renew_lease(self) -> None:
        """Tell the router that we live, so that it does not drop our requests; calls to one that leaves get nowhere."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if self.info is not None and not self._closes_when_idle:
                num_refused, self._num_refused = self._num_refused, 0
                async with asyncio.timeout(self._lease_s):
                    if not await self._handle.renew(self._connection_id, num_refused):
                        raise EngineDeadError("it does not know this connection any more")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
