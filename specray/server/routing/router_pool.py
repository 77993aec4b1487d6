"""All routers known to an ingress: submitting requests, and failover to another router.

A `RequestStream` keeps the prompts of its requests and all tokens emitted so far. The output is a function of prompt,
sampling options and seed, so another engine continues after the last emitted token, and the client's stream neither
repeats nor loses a token. One router's connection lives in `client`, the choice of a router in `policy`.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from math import inf
from typing import Protocol

from specray.engine.engine_request import EngineRequest
from specray.errors import EngineDeadError, InvalidRequestError, PoisonRequestError, QueueFullError, SpecRayError
from specray.grammar import REQUEST_ERRORS
from specray.heartbeat import within
from specray.metrics import Snapshot
from specray.outputs import FinishReason, RequestOutput
from specray.server import OPERATOR_LOG
from specray.server.config import ServingConfig
from specray.server.routing.client import (
    NOT_READY,
    Listener,
    RequestRefusedError,
    RouterCalls,
    RouterClient,
    RouterHandle,
    RouterLostError,
)
from specray.server.routing.messages import RouterInfo
from specray.server.routing.policy import PrefixIndex, ReplicaState, choose_replica
from specray.server.routing.progress import RequestProgress
from specray.server.routing.promotion import promote_shadows
from specray.server.routing.rollout import DrafterRollout
from specray.server.routing.subset import Breadth, IngressPlace, engines_of
from specray.server.tasks import Tasks

LOST = "the engine stopped while it processed this request, and no other engine took over in time; send it again"
DIRECTORY_CHECK_S = 1.0  # between periodic reads of the list of routers; a change is read at once
RECONNECT_S = 0.2  # from the end of a connection to the next attempt
MAX_TRIES = 8  # routers that one request is sent to, until it is refused
RETRY_INTERVAL_S = 1.0
OPENING_S = 10.0  # that a new request waits for a router that runs but is not connected yet
DRAINING = "the server is shutting down and accepts no new requests"
NODES_TIMEOUT_S = 3.0

logger = logging.getLogger(OPERATOR_LOG)


class RequestFailedError(SpecRayError):
    """The engine ended one request with an error."""


class DeadlineError(SpecRayError):
    """A request exceeded its timeout."""

    status = 504


class ReplicaDirectory(Protocol):
    """The running routers, and handles to call them."""

    def replica_ids(self) -> Collection[str]: ...

    def handle(self, replica_id: str) -> RouterHandle: ...

    def place(self) -> IngressPlace:
        """This ingress's number among all ingresses, at present."""

    def subscribe(self, changed: Callable[[], object]) -> None:
        """Have `changed` called, from any thread, when `replica_ids` has changed."""

    def lost_nodes(self) -> Collection[str]:
        """IDs of the nodes that have died; none if they are not known. Blocks."""


class RouterPool:
    """One ingress replica's routers. Construct it inside the event loop, then `start` it.

    Where there are many, it connects to some of them only (`subset`).
    """

    def __init__(self, directory: ReplicaDirectory, config: ServingConfig) -> None:
        self._directory = directory
        self._config = config
        self._clients: dict[str, RouterClient] = {}
        self._prefixes = PrefixIndex(config.routing.prefix_block_size, config.routing.prefix_blocks)
        self._random = random.Random()
        self._changed = asyncio.Event()  # a router has connected or disconnected
        self._must_read = asyncio.Event()  # the list of routers may have changed
        self._clock = asyncio.get_running_loop().time
        self._breadth = Breadth(self._clock())
        self._subset: set[str] = set()  # replica IDs of the routers to be connected to
        self._tasks = Tasks()
        self.drafter_rollout = DrafterRollout(config.speculative, self._clients, self._routers, self._tasks)
        self._is_draining = False
        self._is_replacing = False  # Serve stops the last router that was open, to start another one
        self._last_info: RouterInfo | None = None
        self._num_waiting = 0  # new requests that wait for a router
        self._started_at = -inf
        self.failover_s = config.server.failover_s
        self.num_failovers = 0
        self._num_poison = 0  # not reported to a router yet
        self._explained_ends: set[str] = set()  # replica IDs of engines that requests given up had ended

    def start(self) -> None:
        self._started_at = self._clock()
        self._tasks.spawn(self._watch_directory())
        self._tasks.spawn(promote_shadows(self.drafter_rollout))

    async def close(self) -> None:
        await self._tasks.close()
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    @property
    def info(self) -> RouterInfo | None:
        """Information from any connected router, as all serve the same model; without one, from the last that was.

        None before the first.
        """
        return next((client.info for client in self._clients.values() if client.info is not None), self._last_info)

    @property
    def is_connected(self) -> bool:
        """Whether a router is connected."""
        return any(client.info is not None for client in self._clients.values())

    @property
    def since_token_s(self) -> float:
        """Seconds since any engine last generated a token; infinite if unknown."""
        return min((client.since_token_s for client in self._clients.values()), default=inf)

    @property
    def token_ages(self) -> dict[str, float]:
        """Seconds since each router's engine last generated a token, where known."""
        ages = {replica_id: client.since_token_s for replica_id, client in self._clients.items()}
        return {replica_id: age for replica_id, age in ages.items() if age < inf}

    @property
    def rank_nodes(self) -> dict[str, tuple[str, ...]]:
        """Node addresses of each connected engine's ranks, by replica ID."""
        return {client.replica_id: client.info.rank_nodes for client in self._clients.values() if client.info}

    @property
    def running(self) -> set[str]:
        """Replica IDs of the engines that are not known to have ended: connected, or left to other ingresses."""
        others = set(self._directory.replica_ids()) - self._subset
        return others | self.rank_nodes.keys()

    @property
    def absent_drafters(self) -> dict[str, str]:
        """Why engines decode without their drafter at present, by replica ID."""
        clients = self._clients.values()
        return {client.replica_id: client.drafter_absence for client in clients if client.drafter_absence}

    @property
    def is_draining(self) -> bool:
        """Whether the application is about to stop. Once true, it stays true."""
        self._is_draining = self._is_draining or any(client.is_draining for client in self._clients.values())
        return self._is_draining

    async def drain(self) -> int:
        """Stop accepting requests at every ingress replica. Returns the number of unfinished requests.

        Routers notify the other ingresses through their heartbeats. Call this repeatedly, as each call also notifies
        the routers that have connected since.
        """
        self._is_draining = True
        routers = self._routers()
        answers = await asyncio.gather(*(router.drain() for router in routers), return_exceptions=True)
        known = sum(client.num_unfinished for client in self._clients.values())
        return max(known, sum(answer for answer in answers if isinstance(answer, int)))

    async def stats(self) -> dict[str, Snapshot]:
        """Metrics of every router, by replica ID. EngineDeadError if none answers."""
        routers = self._routers()
        snapshots = await asyncio.gather(*(router.stats() for router in routers), return_exceptions=True)
        pairs = zip(routers, snapshots, strict=True)
        found = {router.replica_id: snapshot for router, snapshot in pairs if not isinstance(snapshot, BaseException)}
        if not found:
            raise EngineDeadError(NOT_READY)
        return found

    async def abort(self, tenant: str, name: str | None) -> None:
        """End a tenant's requests of this name, or all of them, whichever ingress sent them.

        EngineDeadError if an engine does not answer.
        """
        await _all(router.abort_of(tenant, name) for router in self._routers())

    async def flush_caches(self) -> list[str]:
        """Evict idle blocks from all prefix caches. Returns the replica IDs; EngineDeadError if one does not answer."""
        routers = self._routers()
        await _all(router.flush_cache() for router in routers)
        return [router.replica_id for router in routers]

    def _routers(self) -> list[RouterCalls]:
        """The connected routers, and those that only other ingresses are connected to, in the order of their IDs."""
        connected = {name: client for name, client in self._clients.items() if client.info is not None}
        others = self.running - connected.keys()
        calls = [RouterCalls(replica_id, self._directory.handle(replica_id)) for replica_id in others]
        return sorted([*connected.values(), *calls], key=lambda router: router.replica_id)

    async def wait_for_router(self, timeout_s: float = inf) -> None:
        """Wait while no router accepts requests but one is expected, for at most `timeout_s`.

        When Serve replaces the last router of an older version, there is none for a moment: the old one takes no new
        requests, and the new one starts or is being connected. EngineDeadError if there is still none, or if as many
        requests wait as one engine's queue may have.
        """
        start = self._clock()
        if not self._is_open and self._num_waiting >= self._config.max_queued_requests:
            raise EngineDeadError(NOT_READY)
        self._num_waiting += 1
        try:
            while not self._is_open:
                until = start + min(timeout_s, self._patience_s)
                if self._clock() >= until:
                    raise EngineDeadError(DRAINING if self.is_draining else NOT_READY)
                await self.wait_for_change(min(until, self._clock() + RECONNECT_S))
        finally:
            self._num_waiting -= 1

    @property
    def _is_open(self) -> bool:
        return any(client.state.is_open for client in self._clients.values())

    @property
    def _patience_s(self) -> float:
        """How long a new request may wait for a router, while none accepts it."""
        if self.is_draining:
            return 0.0
        if self._is_replacing:
            return self.failover_s
        is_new = self._clock() < self._started_at + OPENING_S
        return OPENING_S if is_new or self._directory.replica_ids() else 0.0

    def check_queues(self) -> None:
        """Raise RequestRefusedError if the last heartbeat of every router reported a full queue.

        Needs no call to a router, so that a flood of requests does not slow down the accepted ones.
        """
        clients = [client for client in self._clients.values() if client.state.is_open]
        refusals = [client.refusal for client in clients if client.refusal is not None]
        if refusals and len(refusals) == len(clients):
            clients[0].refuse(min(refusals, key=lambda refusal: refusal.retry_after_s or 0))

    async def submit(self, requests: list[EngineRequest], timeout_s: float, session: str = "") -> "RequestStream":
        """Start requests on one router, all or none. SpecRayError if no router accepts them."""
        if self.is_draining:
            raise EngineDeadError(DRAINING)
        request_stream = RequestStream(self, requests, timeout_s, session)
        await request_stream.start()
        return request_stream

    async def dispatch(
        self, requests: list[EngineRequest], new_listener: Callable[[], Listener], session: str
    ) -> RouterClient:
        """Submit requests to the best router that accepts them. SpecRayError if none does.

        Each router that is tried gets a new listener. One that is lost while it is tried notifies its listener in
        addition to refusing the requests, and that notification must not reach the next router's listener.
        """
        prefixes = self._prefixes.hashes(requests[0].cache_salt, requests[0].prompt_token_ids)
        cached = self._prefixes.cached(prefixes)
        refusal: SpecRayError = EngineDeadError(NOT_READY)
        tried: set[RouterClient] = set()

        def untried() -> list[ReplicaState]:
            return [client.state for client in self._clients.values() if client not in tried]

        def has_other() -> bool:
            return any(state.is_open and not state.is_last_resort for state in untried())

        while len(tried) < MAX_TRIES:
            # Chosen anew for each try, which may have taken seconds: others have been lost since.
            replica_id = choose_replica(untried(), cached, self._random, self._config.routing, session, prefixes)
            if replica_id is None:
                break
            client = self._clients[replica_id]
            tried.add(client)
            try:
                await client.submit(requests, new_listener(), has_other)
            except RouterLostError as error:
                refusal = EngineDeadError(f"{NOT_READY} ({error})")
            except RequestRefusedError as error:
                refusal = error
                if error.status not in (QueueFullError.status, EngineDeadError.status):
                    break  # every router would refuse it
            else:
                self._prefixes.record(replica_id, prefixes)
                return client
        raise refusal

    async def lost_nodes(self) -> Collection[str]:
        """IDs of the nodes that have died; none if they are not listed in time."""
        try:
            return await within(NODES_TIMEOUT_S, asyncio.to_thread(self._directory.lost_nodes))
        except TimeoutError:
            logger.warning("the nodes that have died were not listed within %g s", NODES_TIMEOUT_S)
            return []

    def record_cause(self, replica_ids: Iterable[str]) -> None:
        """Record that a request given up has ended these engines, so that no other request is blamed for them."""
        self._explained_ends.update(replica_ids)

    def has_cause(self, replica_id: str) -> bool:
        """Whether a request that was given up had ended this engine."""
        return replica_id in self._explained_ends

    def count_poison(self, count: int) -> None:
        """Count requests that are given up, in the metrics of any router that is connected or will be."""
        self._num_poison += count
        for client in self._clients.values():
            if client.state.is_open:
                client.count_poison(self._num_poison)
                self._num_poison = 0
                return

    async def wait_for_change(self, until: float) -> None:
        """Wait until a router connects or disconnects, at most until `until` on the loop's clock."""
        self._changed.clear()
        await _wait(self._changed, until)

    async def _watch_directory(self) -> None:
        """Keep one client per router of our subset."""
        loop = asyncio.get_running_loop()
        self._directory.subscribe(lambda: loop.call_soon_threadsafe(self._must_read.set))
        while True:
            self._must_read.clear()
            try:
                self._read_directory()
            except Exception:  # an ingress that follows no routers must not go on so
                logger.exception("the list of routers cannot be read; trying again")
            await _wait(self._must_read, loop.time() + DIRECTORY_CHECK_S)

    def _read_directory(self) -> None:
        running = set(self._directory.replica_ids())
        states = [client.state for client in self._clients.values()]
        is_free = any(state.is_open and not state.is_last_resort for state in states)
        self._breadth.update(self._clock(), is_free=is_free, has_all=running <= self._subset)
        usual = self._config.routing.engines_per_ingress
        self._subset = engines_of(self._directory.place(), sorted(running), usual, self._breadth.value)
        for replica_id in self._subset - self._clients.keys():
            self._connect(replica_id)
        for replica_id, client in self._clients.items():
            if replica_id in running:
                client.is_wanted = replica_id in self._subset
            else:
                self._stop_using(client)
        self._prefixes.keep_only(self._clients.keys())
        self.drafter_rollout.propagate()

    def _stop_using(self, client: RouterClient) -> None:
        """Serve no longer lists the router, because it has ended or is about to be replaced."""
        was_open = client.state.is_open
        client.stop_using()
        if was_open and not self._is_open:
            self._is_replacing = True

    def _connect(self, replica_id: str) -> None:
        def on_open() -> None:
            self._last_info = client.info
            self._is_replacing = False
            self.count_poison(0)
            self._changed.set()

        def on_close() -> None:
            del self._clients[replica_id]  # reconnected by `_watch_directory` if the router still runs
            self._changed.set()
            asyncio.get_running_loop().call_later(RECONNECT_S, self._must_read.set)

        handle = self._directory.handle(replica_id)
        client = RouterClient(replica_id, handle, self._config.server.lease_s, on_open, on_close)
        self._clients[replica_id] = client
        client.start()


async def _wait(event: asyncio.Event, until: float) -> None:
    """Wait for an event, at most until `until` on the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await event.wait()


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for calls to several routers. EngineDeadError if one of them failed."""
    failures = [result for result in await asyncio.gather(*calls, return_exceptions=True) if result is not None]
    if failures:
        raise EngineDeadError(f"{len(failures)} engines did not answer; send the request again")


class RequestStream:
    """Requests submitted together. Iterate `outputs`, and always `close` it afterwards."""

    def __init__(
        self, router_pool: RouterPool, requests: Sequence[EngineRequest], timeout_s: float, session: str
    ) -> None:
        self._router_pool = router_pool
        self._session = session
        self._progress = [RequestProgress(request) for request in requests]
        self._unfinished: dict[str, int] = {}  # request id of the current attempt -> index
        self._client: RouterClient | None = None
        self._num_attempts = 0
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._events: asyncio.Queue[RequestOutput | RouterLostError] = asyncio.Queue()

    async def start(self) -> None:
        """Start the requests on the first router that accepts them. SpecRayError if none does.

        A router refuses requests that were sent before this ingress noticed that Serve replaces it. They are sent to
        the next one.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = min(self._deadline, clock() + OPENING_S)
        while self._client is None:
            try:
                await self._dispatch(range(len(self._progress)))
            except SpecRayError as error:
                if error.status != EngineDeadError.status or clock() >= give_up_at:
                    raise
                await self._router_pool.wait_for_change(min(give_up_at, clock() + RECONNECT_S))
                await self._router_pool.wait_for_router(self._deadline - clock())

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the request, output) until all have finished. Raises SpecRayError if one fails."""
        while self._unfinished:
            event = await self._next()
            if isinstance(event, RouterLostError):
                await self._refuse_poison(event)
                await self._fail_over()
                continue
            index = self._unfinished.get(event.request_id)
            if index is None:  # of an earlier attempt
                continue
            if event.finish_reason is not None:
                del self._unfinished[event.request_id]
            # Requests aborted here have no further output. The engine aborts at the deadline, or for the client.
            if event.finish_reason is FinishReason.ABORT and event.error is not None:
                raise self._deadline_error()
            if event.error in REQUEST_ERRORS:  # of the request, not of the engine
                raise InvalidRequestError(event.error, REQUEST_ERRORS[event.error])
            if event.finish_reason is FinishReason.ERROR:
                raise RequestFailedError(f"the engine failed on this request: {event.error}")
            yield index, self._progress[index].add(event)

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        if self._client is not None:
            self._client.forget(list(self._unfinished), abort=list(self._unfinished))
        self._unfinished = {}

    async def _next(self) -> RequestOutput | RouterLostError:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._events.get()
        except TimeoutError:
            raise self._deadline_error() from None

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"the request exceeded its timeout of {self._timeout_s:g} s; request fewer tokens or a longer timeout"
        )

    async def _dispatch(self, indexes: Sequence[int]) -> None:
        remaining_s = max(0.0, self._deadline - asyncio.get_running_loop().time())
        attempts = {index: self._progress[index].attempt(self._num_attempts, remaining_s) for index in indexes}
        self._num_attempts += 1
        self._unfinished = {request.request_id: index for index, request in attempts.items()}
        self._client = await self._router_pool.dispatch(list(attempts.values()), self._new_listener, self._session)

    def _new_listener(self) -> Listener:
        """A listener for the next attempt; events of earlier attempts are dropped with their queue."""
        self._events = asyncio.Queue()
        return self._events.put_nowait

    async def _refuse_poison(self, lost: RouterLostError) -> None:
        """PoisonRequestError if a request must not be given to another engine after this one was lost."""
        blamed = [
            self._progress[index]
            for request_id, index in self._unfinished.items()
            if lost.end.request_ids is None or request_id in lost.end.request_ids
        ]
        suspects = [progress for progress in blamed if progress.dies_with(lost)]
        if not suspects:
            return
        lost_nodes = await self._router_pool.lost_nodes()
        running = self._router_pool.running - {lost.replica_id}  # Serve may still list it
        has_cause = self._router_pool.has_cause
        poison = [progress for progress in suspects if progress.is_poison(lost_nodes, running, has_cause)]
        if not poison:
            return
        for progress in poison:
            if progress.is_proven:
                self._router_pool.record_cause(death.replica_id for death in progress.deaths)
        self._router_pool.count_poison(len(poison))
        name, count = poison[0].request_id, len(poison[0].deaths)
        logger.error(
            "gave up the request %s: %d engines stopped while they computed it, the last: %s",
            name,
            count,
            lost.end.reason,
        )
        raise PoisonRequestError(
            f"{count} engines stopped while they computed this request, so no other one gets it; do not send it again "
            f"as it is. The server's log has the reason under {name}"
        )

    async def _fail_over(self) -> None:
        """Continue the unfinished requests on the first engine that accepts them."""
        indexes = list(self._unfinished.values())
        clock = asyncio.get_running_loop().time
        give_up_at = min(self._deadline, clock() + self._router_pool.failover_s)
        self._client = None
        while self._client is None:
            try:
                await self._dispatch(indexes)
            except SpecRayError as error:
                if clock() >= give_up_at:
                    raise EngineDeadError(f"{LOST} ({error})") from None
                await self._router_pool.wait_for_change(min(give_up_at, clock() + RETRY_INTERVAL_S))
        self._router_pool.num_failovers += len(indexes)
        logger.warning("%d requests continue on the router %s", len(indexes), self._client.replica_id)
