"""Simulated engines and ingresses, what Ray Serve does with them, and requests on their way."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from benchmarks.fleet.engine import Hardware, SimulatedEngine
from benchmarks.fleet.traffic import Traffic
from cluster.autoscaling import Trend, decide
from cluster.config import AutoscalingOptions
from specray.engine.engine_request import EngineRequest
from specray.errors import SpecRayError
from specray.sampling_params import SamplingParams
from specray.server.config import ServingConfig
from specray.server.routing.router_pool import RouterPool
from specray.server.routing.subset import IngressPlace

UNLISTED_S = 5.0  # after which Ray declares a node dead, and Serve's directory no longer has its engines
STARTING_S = 30.0  # that a new engine takes
REPORT_S = 10.0  # between an engine's reports to the autoscaling policy
RACK_SIZE = 32  # engines
TIMEOUT_S = 60.0  # of a request


class Outcome(NamedTuple):
    """How one request went."""

    arrived: float
    first_token_s: float | None  # None: it failed, or was refused
    num_prompt_tokens: int
    num_cached: int
    most_cached: int  # with one cache for all engines that forgets nothing
    status: int  # as of HTTP; 200 if it ended well


class Directory:
    """What one ingress sees of the engines."""

    def __init__(self, simulated: "SimulatedCluster", place: IngressPlace) -> None:
        self._simulated, self._place = simulated, place

    def replica_ids(self) -> Collection[str]:
        return self._simulated.listed

    def handle(self, replica_id: str) -> SimulatedEngine:
        return self._simulated.engines[replica_id]

    def place(self) -> IngressPlace:
        return self._place

    def subscribe(self, changed: Callable[[], object]) -> None:
        self._simulated.subscribers.append(changed)

    def lost_nodes(self) -> Collection[str]:
        return self._simulated.lost_nodes


@dataclass
class SimulatedCluster:
    """All engines and ingresses. Construct it inside the event loop, then `start` it."""

    config: ServingConfig
    hardware: Hardware
    num_engines: int
    num_ingresses: int
    seed: int = 0
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)  # ended ones included
    listed: set[str] = field(default_factory=set)
    subscribers: list[Callable[[], object]] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._random = Random(self.seed)
        for _ in range(self.num_engines):
            self._add_engine()
        places = [IngressPlace(rank, self.num_ingresses) for rank in range(self.num_ingresses)]
        self.ingresses = [RouterPool(Directory(self, place), self.config) for place in places]
        self._num_sent = 0

    async def start(self) -> None:
        """Connect all ingresses."""
        for ingress in self.ingresses:
            ingress.start()
        await asyncio.sleep(2.0)

    async def close(self) -> None:
        for ingress in self.ingresses:
            await ingress.close()

    @property
    def num_streams(self) -> int:
        return sum(len(ingress.rank_nodes) for ingress in self.ingresses)

    @property
    def num_submits(self) -> int:
        return sum(engine.num_submits for engine in self.engines.values())

    async def send(self, traffic: Traffic, seconds: float) -> None:
        """Send requests at random times for so long, and wait until they have ended."""
        end, tasks = self._loop.time() + seconds, []
        while (now := self._loop.time()) < end:
            await asyncio.sleep(self._random.expovariate(traffic.rate(now)))
            tasks.append(asyncio.create_task(self._ask(traffic)))
        await asyncio.gather(*tasks)

    async def lose_rack(self) -> None:
        """A rack's machines lose their power. Serve replaces its engines."""
        rack = sorted(self.listed)[: min(RACK_SIZE, len(self.listed) // 4)]
        for replica_id in rack:
            self.engines[replica_id].is_silent = True
        await asyncio.sleep(UNLISTED_S)
        self.lost_nodes += rack
        self._unlist(rack)
        await asyncio.sleep(STARTING_S)
        for _ in rack:
            self._add_engine()
        self._publish()

    async def roll_out(self, at_once: int) -> None:
        """Replace all engines by new ones, some at once. Their requests are finished first."""
        old = sorted(self.listed)
        for start in range(0, len(old), at_once):
            some = old[start : start + at_once]
            for _ in some:
                self._add_engine()
            self._unlist(some)
            while any(self.engines[replica_id].num_unfinished for replica_id in some):
                await asyncio.sleep(0.5)

    async def autoscale(self, options: AutoscalingOptions) -> None:
        """Follow the autoscaling policy from now on."""
        trend: Trend | None = None
        target = len(self.listed)
        while True:
            await asyncio.sleep(REPORT_S)
            history = {replica_id: [self.engines[replica_id].sample()] for replica_id in self.listed}
            decision = decide(history, target, self._loop.time(), trend, options)
            trend, change, target = decision.trend, decision.num_replicas - target, decision.num_replicas
            for _ in range(change):
                self._loop.call_later(STARTING_S, self._start_one)
            if change < 0:
                self._unlist(sorted(self.listed)[change:])

    def _start_one(self) -> None:
        self._add_engine()
        self._publish()

    def _add_engine(self) -> None:
        number = len(self.engines)
        replica_id = f"engine-{number:05}"
        seed = self._random.randrange(2**32)
        self.engines[replica_id] = SimulatedEngine(replica_id, replica_id, self.config.engine, self.hardware, seed)
        self.listed.add(replica_id)

    def _unlist(self, replica_ids: Collection[str]) -> None:
        self.listed.difference_update(replica_ids)
        self._publish()

    def _publish(self) -> None:
        for changed in self.subscribers:
            changed()

    async def _ask(self, traffic: Traffic) -> None:
        """Send one request to a random ingress, as Serve's proxy does."""
        ingress, arrived = self._random.choice(self.ingresses), self._loop.time()
        prompt = traffic.prompt()
        params = SamplingParams(max_tokens=traffic.num_output, temperature=0.0, seed=0, ignore_eos=True)
        self._num_sent += 1
        request = EngineRequest(f"r{self._num_sent}", prompt.token_ids, params)
        first_token_s, num_cached, status = None, 0, 200
        try:
            await ingress.wait_for_router(TIMEOUT_S)
            ingress.check_queues()
            stream = await ingress.submit([request], TIMEOUT_S)
            async for _, output in stream.outputs():
                if first_token_s is None and output.token_ids:
                    first_token_s = self._loop.time() - arrived
                    num_cached = output.usage.num_cached_tokens
        except SpecRayError as error:
            first_token_s, status = None, error.status
        self.outcomes.append(
            Outcome(arrived, first_token_s, len(prompt.token_ids), num_cached, prompt.most_cached, status)
        )
