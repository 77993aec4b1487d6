"""The ingress's calls to one router, and its connection to it: an output stream and failure detection.

A client lasts as long as its connection. A router that is silent for `HEARTBEAT_TIMEOUT_S`, because it is frozen or
unreachable, counts as lost, and its later outputs are ignored. Failover of its requests lives in `router_pool`.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from math import inf
from typing import Any, NoReturn, Protocol

from specray.engine.engine_request import EngineRequest
from specray.errors import EngineDeadError, SpecRayError
from specray.heartbeat import LocalHeartbeat, SilenceWatch, within
from specray.metrics import Snapshot
from specray.outputs import RequestOutput
from specray.server import OPERATOR_LOG
from specray.server.routing.messages import (
    ConnectionEnd,
    DesiredDrafter,
    HeartbeatChanges,
    Item,
    Refusal,
    RouterHeartbeat,
    RouterInfo,
)
from specray.server.routing.policy import ReplicaState
from specray.server.tasks import Tasks

NOT_READY = "the engine is starting or restarting; try again in a few seconds"
HEARTBEAT_TIMEOUT_S = 3.0  # a router that is silent for longer counts as lost
# A router that has sent no item, or has not answered a request, for so long gets new requests only if all others are
# late or full. If it has sent no items either, requests that it has not answered go to another router.
LATE_ITEM_S, LATE_ANSWER_S = 1.2, 0.5
CONNECT_TIMEOUT_S = 5.0
DRAFTER_LOAD_TIMEOUT_S = 600.0  # a drafter may have to be downloaded first

logger = logging.getLogger(OPERATOR_LOG)


class RouterHandle(Protocol):
    """The calls to one Router: a Serve handle, or a plain object in tests."""

    def outputs(self, connection_id: str) -> AsyncIterator[Item]: ...

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def renew(self, connection_id: str, num_refused: int, num_poison: int) -> bool: ...

    async def stats(self) -> Snapshot: ...

    async def drafter(self) -> dict[str, Any]: ...

    async def apply(self, desired: DesiredDrafter) -> Refusal | None: ...

    async def drain(self) -> int: ...

    async def abort_of(self, tenant: str, name: str | None) -> None: ...

    async def flush_cache(self) -> None: ...


class RequestRefusedError(SpecRayError):
    """The router refused a request, for the reasons in `refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.status = refusal.status
        self.param = refusal.param
        self.retry_after_s = refusal.retry_after_s
        self.code = refusal.code
        self.overflow = refusal.overflow


class RouterLostError(EngineDeadError):
    """The connection to the router `replica_id` on `node_id` is lost, and with it the state of its requests."""

    def __init__(self, message: str, end: ConnectionEnd | None = None, replica_id: str = "", node_id: str = "") -> None:
        super().__init__(message)
        self.end = end if end is not None else ConnectionEnd(message, None)
        self.replica_id, self.node_id = replica_id, node_id


Listener = Callable[[RequestOutput | RouterLostError], None]


class RouterCalls:
    """Calls to the router `replica_id` that need no connection to it."""

    def __init__(self, replica_id: str, handle: RouterHandle) -> None:
        self.replica_id = replica_id
        self._handle = handle

    async def stats(self) -> Snapshot:
        return await within(HEARTBEAT_TIMEOUT_S, self._handle.stats())

    async def drain(self) -> int:
        """Notify the router, and through its heartbeats ingresses, that the application is about to stop.

        Returns the number of its unfinished requests.
        """
        return await within(HEARTBEAT_TIMEOUT_S, self._handle.drain())

    async def abort_of(self, tenant: str, name: str | None) -> None:
        """See `AsyncEngine.abort_of`."""
        await within(HEARTBEAT_TIMEOUT_S, self._handle.abort_of(tenant, name))

    async def flush_cache(self) -> None:
        await within(HEARTBEAT_TIMEOUT_S, self._handle.flush_cache())

    async def drafter(self) -> dict[str, Any]:
        """A report of the router's drafter, see `cluster.engine.reconciler.drafter_report`."""
        return await within(HEARTBEAT_TIMEOUT_S, self._handle.drafter())

    async def apply(self, desired: DesiredDrafter) -> None:
        """Replace the router's drafter and wait until it is ready. RequestRefusedError or RouterLostError."""
        try:
            refusal = await within(DRAFTER_LOAD_TIMEOUT_S, self._handle.apply(desired))
        except Exception as error:
            raise RouterLostError(f"replacing the drafter failed: {first_line(error)}") from error
        if refusal is not None:
            raise RequestRefusedError(refusal)


class RouterClient(RouterCalls):
    """One connection to a router. Construct it inside the event loop, then `start` it.

    `on_open` is called when the router's first item arrives, `on_close` when the connection has ended and all listeners
    have been notified.
    """

    def __init__(
        self,
        replica_id: str,
        handle: RouterHandle,
        lease_s: float,
        on_open: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(replica_id, handle)
        self.info: RouterInfo | None = None  # once connected
        self.is_wanted = True  # False: no new requests, and the connection is closed once all have finished
        self._clock = asyncio.get_running_loop().time
        self._heartbeat: RouterHeartbeat | None = None
        self._heartbeat_at = 0.0
        self._lease_s = lease_s
        self._on_open = on_open
        self._on_close = on_close
        self._connection_id = uuid.uuid4().hex
        self._listeners: dict[str, Listener] = {}
        self._num_refused = 0  # requests refused here since the last renewal
        self._num_poison = 0  # requests given up here since then
        self._end: ConnectionEnd | None = None
        self._is_stopping = False
        self._stream = LocalHeartbeat(self._clock)  # beats with every item
        self._silence_s = 0.0
        self._unanswered: list[float] = []  # when requests were sent that it has not answered, oldest first
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()

    @property
    def state(self) -> ReplicaState:
        """The router's state, for `choose_replica`."""
        heartbeat = self._heartbeat
        return ReplicaState(
            self.replica_id,
            self.num_unfinished,
            0.0 if heartbeat is None else heartbeat.kv_usage,
            None if heartbeat is None else heartbeat.acceptance_length,
            is_alive=self.info is not None,
            is_draining=self._closes_when_idle,
            is_last_resort=self.refusal is not None or self._is_late,
        )

    @property
    def _is_late(self) -> bool:
        has_no_answer = bool(self._unanswered) and self._clock() - self._unanswered[0] > LATE_ANSWER_S
        return has_no_answer or self._sends_nothing

    @property
    def _sends_nothing(self) -> bool:
        return self._silence_s > LATE_ITEM_S

    @property
    def since_token_s(self) -> float:
        """Seconds since the router's engine last generated a token; infinite if unknown."""
        if self.info is None or self._heartbeat is None:
            return inf
        return self._heartbeat.later(self._clock() - self._heartbeat_at).since_token_s

    @property
    def drafter_absence(self) -> str:
        """Why the router's engine decodes without its drafter at present; empty if it does not, or if unknown."""
        return self._heartbeat.drafter_absence if self._heartbeat is not None and self.info is not None else ""

    @property
    def refusal(self) -> Refusal | None:
        """How the router would refuse another request; None if its queue has space."""
        return self._heartbeat.refusal if self._heartbeat is not None else None

    def refuse(self, refusal: Refusal) -> NoReturn:
        """Refuse a request on behalf of the router, and count it for the router's metrics."""
        self._num_refused += 1
        raise RequestRefusedError(refusal)

    def count_poison(self, count: int) -> None:
        """Count requests that were given up, for the metrics of this router, which is another one than it ended."""
        self._num_poison += count

    def stop_using(self) -> None:
        """Send no new requests, and disconnect once all have finished. Serve stops the router, and calls end there."""
        self._is_stopping = True

    @property
    def _closes_when_idle(self) -> bool:
        return self._is_stopping or not self.is_wanted

    async def submit(
        self, requests: list[EngineRequest], listener: Listener, has_other: Callable[[], bool] = lambda: False
    ) -> None:
        """Start requests, all or none, whose outputs go to `listener`. RequestRefusedError or RouterLostError.

        If the router sends nothing and `has_other()` says that another one could take the requests, RouterLostError
        comes before HEARTBEAT_TIMEOUT_S. If the caller is cancelled, the requests are aborted.
        """
        request_ids = [request.request_id for request in requests]
        self._listeners.update(dict.fromkeys(request_ids, listener))
        call = self._tasks.spawn(self._submit(requests, has_other))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            self.forget(request_ids, abort=request_ids, after=call)
            raise
        except RouterLostError:
            self.forget(request_ids, abort=request_ids)  # it may have received the request
            raise
        except SpecRayError:
            self.forget(request_ids)
            raise

    def forget(
        self, request_ids: Iterable[str], abort: Collection[str] = (), after: asyncio.Task[None] | None = None
    ) -> None:
        """Remove listeners of requests, and abort the requests in `abort` once `after` is done."""
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
        if abort:
            self._tasks.spawn(self._abort(list(abort), after))

    @property
    def is_draining(self) -> bool:
        """Whether the router has been notified that the application is about to stop."""
        return self._heartbeat is not None and self._heartbeat.is_draining

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests at the router: our own, and those of other ingresses as of its last heartbeat."""
        return len(self._listeners) + (0 if self._heartbeat is None else self._heartbeat.num_others)

    @property
    def desired(self) -> DesiredDrafter | None:
        """The drafter last applied at the router; None if unknown, or if drafters cannot be replaced there."""
        return self._heartbeat.desired if self._heartbeat is not None and self.info is not None else None

    async def _submit(self, requests: list[EngineRequest], has_other: Callable[[], bool]) -> None:
        sent_at = self._clock()
        self._unanswered.append(sent_at)
        try:
            call = self._handle.submit(self._connection_id, requests)
            refusal = await within(HEARTBEAT_TIMEOUT_S, call, lambda: self._sends_nothing and has_other())
        except Exception as error:
            raise RouterLostError(f"submit failed: {first_line(error)}") from error
        finally:
            self._unanswered.remove(sent_at)
        if refusal is not None:
            raise RequestRefusedError(refusal)

    async def _abort(self, request_ids: list[str], after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(Exception):  # a lost router has nothing left to abort
            await within(HEARTBEAT_TIMEOUT_S, self._handle.abort(request_ids))

    async def _run(self) -> None:
        """The connection's whole life: returns after it has ended and all listeners have been notified."""
        parts = [self._tasks.spawn(part) for part in (self._receive(), self._renew_lease(), self._watch_silence())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            error = next(part.exception() for part in parts if part.done())
            if error is None:
                logger.info("disconnected from the router %s", self.replica_id)
            elif self.info is not None:
                logger.warning("lost the router %s: %s", self.replica_id, first_line(error))
        finally:
            for part in parts:
                part.cancel()
            node_id = self.info.node_id if self.info is not None else ""
            self.info = None
            if self._is_stopping:
                self._end = ConnectionEnd("the router was stopped", [])
            listeners, self._listeners = self._listeners, {}
            for listener in set(listeners.values()):
                reason = "the engine stopped while it worked on this request"
                listener(RouterLostError(reason, self._end, self.replica_id, node_id))
            self._on_close()

    async def _receive(self) -> None:
        async for item in self._handle.outputs(self._connection_id):
            self._stream.beat()
            if isinstance(item, RouterInfo):
                self.info = item
                self._on_open()
                logger.info("connected to the router %s", self.replica_id)
            elif isinstance(item, RouterHeartbeat | dict):
                self._take_heartbeat(item)
            elif isinstance(item, ConnectionEnd):
                self._end = item
            else:
                self._deliver(item)
        raise EngineDeadError("the output stream ended")

    def _take_heartbeat(self, item: RouterHeartbeat | HeartbeatChanges) -> None:
        now = self._clock()
        if isinstance(item, dict):
            assert self._heartbeat is not None, "the first heartbeat of a stream is whole"
            item = self._heartbeat.later(now - self._heartbeat_at)._replace(**item)
        self._heartbeat, self._heartbeat_at = item, now

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if listener := self._listeners.get(output.request_id):
                listener(output)
                if output.finish_reason is not None:
                    del self._listeners[output.request_id]

    async def _watch_silence(self) -> None:
        """Return when the connection may close; raise EngineDeadError when the router has been silent for too long."""
        self._stream.beat()  # the deadline of the first item begins now
        interval_s = HEARTBEAT_TIMEOUT_S / 6
        watch = SilenceWatch(self._stream, interval_s, self._clock)
        while True:
            await asyncio.sleep(interval_s)
            if self._closes_when_idle and not self._listeners:
                return
            self._silence_s = watch.poll()
            if self._silence_s > (HEARTBEAT_TIMEOUT_S if self.info is not None else CONNECT_TIMEOUT_S):
                raise EngineDeadError(f"nothing received for {self._silence_s:.1f} s")

    async def _renew_lease(self) -> None:
        """Renew our lease, so that the router keeps our requests. A router that Serve is stopping cannot be called."""
        while True:
            # A renewal takes a millisecond of CPU. Without requests, a lease that ends costs no more than a connection.
            await asyncio.sleep(self._lease_s / (4 if self._listeners else 2))
            if self.info is not None and not self._is_stopping:
                counts = self._num_refused, self._num_poison
                self._num_refused = self._num_poison = 0
                if not await within(self._lease_s, self._handle.renew(self._connection_id, *counts)):
                    self._end = ConnectionEnd("the router has dropped this connection", [])
                    raise EngineDeadError(self._end.reason)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
