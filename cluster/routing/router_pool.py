"""All routers an ingress knows: where a request goes, and where it goes on when its router is lost.

A job keeps its requests' prompts and every token they have been given. Since a text is a function of prompt, options
and seed, another engine can go on behind the last of these tokens, and the client's stream has no seam: no token twice,
none missing. Not here: one router's connection (`client`), which router (`routing`), HTTP (`openai`).
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from cluster.config import AppConfig
from cluster.engine.connections import RouterInfo
from cluster.routing.client import NOT_READY, Listener, RequestRefusedError, RouterClient, RouterHandle, RouterLostError
from cluster.routing.drafting import DrafterRollout
from cluster.routing.policy import PrefixIndex, choose_route
from cluster.tasks import Tasks
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, QueueFullError, SpecRayError
from specray.metrics import Snapshot
from specray.outputs import FinishReason, RequestOutput, RequestUsage, add_histograms

LOST = "the engine stopped while it worked on this request, and no other one could take it over in time; send it again"
DIRECTORY_POLL_S = 0.2  # between looks for routers that came or went
RETRY_INTERVAL_S = 1.0
DRAINING = "the server is shutting down: it finishes what it has begun, and takes nothing new"
MAX_FAILOVERS = 8  # a request that took so many engines down goes to no other

logger = logging.getLogger("ray.serve")


class RequestFailedError(SpecRayError):
    """The engine ended one request with an error."""


class DeadlineError(SpecRayError):
    """A request took longer than it may."""

    status = 504


class ReplicaDirectory(Protocol):
    """Which routers there are, and how to reach one."""

    def replica_ids(self) -> Collection[str]: ...

    def handle(self, replica_id: str) -> RouterHandle: ...


class RouterPool:
    """One ingress replica's routers; construct it inside the event loop, then `start` it."""

    def __init__(self, directory: ReplicaDirectory, config: AppConfig) -> None:
        self._directory = directory
        self._config = config
        self._clients: dict[str, RouterClient] = {}
        self._prefixes = PrefixIndex(config.routing.prefix_block_size, config.routing.prefix_blocks)
        self._random = random.Random()
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        self.drafts = DrafterRollout(config.speculative, self._clients, self._tasks)
        self._is_draining = False
        self.failover_s = config.server.failover_s
        self.num_failovers = 0

    def start(self) -> None:
        self._tasks.spawn(self._follow_directory())

    async def close(self) -> None:
        await self._tasks.close()
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    @property
    def info(self) -> RouterInfo | None:
        """Of any connected router: they serve the same model. None while there is none."""
        return next((client.info for client in self._clients.values() if client.info is not None), None)

    @property
    def since_token_s(self) -> float:
        """Seconds since any engine was last known to make a token."""
        return min((client.since_token_s for client in self._clients.values()), default=inf)

    @property
    def token_ages(self) -> dict[str, float]:
        """Seconds since each router's engine was last known to make a token, of those that have said so."""
        ages = {replica_id: client.since_token_s for replica_id, client in self._clients.items()}
        return {replica_id: age for replica_id, age in ages.items() if age < inf}

    @property
    def rank_nodes(self) -> dict[str, tuple[str, ...]]:
        """Of each connected router's engine, address of the node that each rank runs on."""
        return {client.replica_id: client.info.rank_nodes for client in self._clients.values() if client.info}

    @property
    def is_draining(self) -> bool:
        """Whether the application is about to be stopped. That is for good: whoever heard it once need not again."""
        self._is_draining = self._is_draining or any(client.is_draining for client in self._clients.values())
        return self._is_draining

    async def drain(self) -> int:
        """Take no new requests, at any ingress replica; how many are still under way. To be asked again and again.

        Routers spread the news, as every ingress listens to them; those started since are told in the next call.
        """
        self._is_draining = True
        clients = [client for client in self._clients.values() if client.info is not None]
        uninformed = [client.drain() for client in clients if not client.is_draining]
        await asyncio.gather(*uninformed, return_exceptions=True)
        return sum(client.num_unfinished for client in clients)

    async def stats(self) -> dict[str, Snapshot]:
        """Every connected router's counters, by replica. EngineDeadError if there is none."""
        clients = [client for client in self._clients.values() if client.info is not None]
        snapshots = await asyncio.gather(*(client.stats() for client in clients), return_exceptions=True)
        pairs = zip(clients, snapshots, strict=True)
        found = {client.replica_id: snapshot for client, snapshot in pairs if not isinstance(snapshot, BaseException)}
        if not found:
            raise EngineDeadError(NOT_READY)
        return found

    def check_queues(self) -> None:
        """RequestRefusedError if every router has said that its queue is full.

        Nobody is asked: a flood of requests leaves the processors to those under way.
        """
        clients = [client for client in self._clients.values() if client.state.is_open]
        refusals = [client.refusal for client in clients if client.refusal is not None]
        if refusals and len(refusals) == len(clients):
            clients[0].refuse(min(refusals, key=lambda refusal: refusal.retry_after_s or 0))

    async def submit(self, requests: list[EngineRequest], timeout_s: float, session: str = "") -> "RequestStream":
        """Start requests on one router, all or none. A SpecRayError if no router takes them."""
        if self.is_draining:
            raise EngineDeadError(DRAINING)
        request_stream = RequestStream(self, requests, timeout_s, session)
        await request_stream.start()
        return request_stream

    async def place(
        self, requests: list[EngineRequest], new_listener: Callable[[], Listener], session: str
    ) -> RouterClient:
        """The router that has taken the requests: the best one that would. A SpecRayError if none did.

        Each router that is tried has a listener of its own: one that is lost meanwhile tells it so, and refuses too.
        """
        prompt = requests[0].prompt_token_ids
        namespace = requests[0].cache_salt
        states = [client.state for client in self._clients.values()]
        cached = self._prefixes.cached(namespace, prompt)
        route = choose_route(states, cached, self._random, self._config.routing, session)
        refusal: SpecRayError = EngineDeadError(NOT_READY)
        for replica_id in route.replica_ids:
            client = self._clients.get(replica_id)
            if client is None:
                continue
            try:
                await client.submit(requests, new_listener())
            except RouterLostError as error:
                refusal = EngineDeadError(f"{NOT_READY} ({error})")
            except RequestRefusedError as error:
                refusal = error
                if error.status not in (QueueFullError.status, EngineDeadError.status):
                    break  # it would be refused everywhere
            else:
                self._prefixes.record(replica_id, namespace, prompt)
                return client
        raise refusal

    async def wait_for_change(self, until: float) -> None:
        """Wait for a router to come or go, but not beyond `until` on the loop's clock."""
        self._changed.clear()
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _follow_directory(self) -> None:
        """Keep one client for each router there is."""
        while True:
            there = set(self._directory.replica_ids())
            for replica_id in there - self._clients.keys():
                self._connect(replica_id)
            for replica_id in self._clients.keys() - there:
                self._clients[replica_id].close_when_idle()
            self._prefixes.keep_only(self._clients.keys())
            self.drafts.propagate()
            await asyncio.sleep(DIRECTORY_POLL_S)

    def _connect(self, replica_id: str) -> None:
        def closed() -> None:
            del self._clients[replica_id]  # if it is still there, the next look connects again
            self._changed.set()

        handle = self._directory.handle(replica_id)
        client = RouterClient(replica_id, handle, self._config.server.lease_s, self._changed.set, closed)
        self._clients[replica_id] = client
        client.start()


class RequestStream:
    """Requests submitted together; iterate `outputs`, and `close` however that ends."""

    def __init__(
        self, router_pool: RouterPool, requests: Sequence[EngineRequest], timeout_s: float, session: str
    ) -> None:
        self._router_pool = router_pool
        self._session = session
        self._parts = [_RequestProgress(request) for request in requests]
        self._unfinished: dict[str, int] = {}  # request id of the present attempt -> index
        self._client: RouterClient | None = None
        self._num_failovers = 0
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._news: asyncio.Queue[RequestOutput | RouterLostError] = asyncio.Queue()

    async def start(self) -> None:
        await self._place(range(len(self._parts)))

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the request, its news) until each has finished. Raises a SpecRayError when one cannot."""
        while self._unfinished:
            news = await self._next()
            if isinstance(news, RouterLostError):
                await self._fail_over()
                continue
            index = self._unfinished.get(news.request_id)
            if index is None:  # of an attempt that was given up
                continue
            if news.finish_reason is not None:
                del self._unfinished[news.request_id]
            if news.finish_reason is FinishReason.ABORT:  # by the engine itself: we hear nothing of what we aborted
                raise self._too_late()
            if news.finish_reason is FinishReason.ERROR:
                raise RequestFailedError(f"the engine gave this request up: {news.error}")
            yield index, self._parts[index].enter(news)

    def close(self) -> None:
        """Abort what has not finished. May be called twice."""
        if self._client is not None:
            self._client.forget(list(self._unfinished), abort=list(self._unfinished))
        self._unfinished = {}

    async def _next(self) -> RequestOutput | RouterLostError:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._news.get()
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> DeadlineError:
        return DeadlineError(
            f"the request took longer than {self._timeout_s:g} s; ask for fewer tokens or a longer timeout"
        )

    async def _place(self, indexes: Sequence[int]) -> None:
        left_s = max(0.0, self._deadline - asyncio.get_running_loop().time())
        attempts = {index: self._parts[index].attempt(self._num_failovers, left_s) for index in indexes}
        self._unfinished = {request.request_id: index for index, request in attempts.items()}
        self._client = await self._router_pool.place(list(attempts.values()), self._new_listener, self._session)

    def _new_listener(self) -> Listener:
        """What an earlier one still hears goes nowhere."""
        self._news = asyncio.Queue()
        return self._news.put_nowait

    async def _fail_over(self) -> None:
        """Go on elsewhere, as soon as there is an engine that takes what is not finished."""
        indexes = list(self._unfinished.values())
        clock = asyncio.get_running_loop().time
        give_up = min(self._deadline, clock() + self._router_pool.failover_s)
        self._client = None
        self._num_failovers += 1
        if self._num_failovers > MAX_FAILOVERS:
            raise EngineDeadError(f"{LOST} (it lost {MAX_FAILOVERS} engines)")
        while self._client is None:
            try:
                await self._place(indexes)
            except SpecRayError as error:
                if clock() >= give_up:
                    raise EngineDeadError(f"{LOST} ({error})") from None
                await self._router_pool.wait_for_change(min(give_up, clock() + RETRY_INTERVAL_S))
        self._router_pool.num_failovers += len(indexes)
        logger.warning("%d requests go on at the router %s", len(indexes), self._client.replica_id)


class _RequestProgress:
    """One request of a job: what was asked, and what it has been given so far."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._emitted: list[int] = []
        self._usage: RequestUsage | None = None
        self._usage_before: RequestUsage | None = None  # when the last engine was lost

    def attempt(self, number: int, timeout_s: float) -> EngineRequest:
        """The request as the next engine gets it, with the time that is left; every attempt has an id of its own."""
        if number == 0:
            return replace(self._request, timeout_s=timeout_s)
        self._usage_before = self._usage
        request_id = f"{self._request.request_id}~{number}"
        emitted = tuple(self._emitted)
        return replace(self._request, request_id=request_id, emitted_token_ids=emitted, timeout_s=timeout_s)

    def enter(self, news: RequestOutput) -> RequestOutput:
        """Take note of news; the same, with the usage of all attempts."""
        self._emitted += news.token_ids
        self._usage = _merge_usage(self._usage_before, news.usage)
        return news._replace(usage=self._usage)


def _merge_usage(before: RequestUsage | None, now: RequestUsage) -> RequestUsage:
    """Usage of a request that went on at another engine, which counts the tokens it was given as its own."""
    if before is None:
        return now
    return now._replace(
        num_cached_tokens=before.num_cached_tokens,
        num_verify_steps=before.num_verify_steps + now.num_verify_steps,
        num_draft_tokens=before.num_draft_tokens + now.num_draft_tokens,
        num_accepted=before.num_accepted + now.num_accepted,
        num_preemptions=before.num_preemptions + now.num_preemptions,
        accept_histogram=tuple(add_histograms((before.accept_histogram, now.accept_histogram))),
        is_lossy=before.is_lossy or now.is_lossy,
    )
