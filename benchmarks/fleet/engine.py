"""One simulated engine: the real admission, scheduler, prefix cache and draft budget over ranks that only take time."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any, NamedTuple

from benchmarks.fleet.costs import StepCosts
from cluster.autoscaling import Sample
from cluster.engine.connections import Connections
from specray.config import EngineConfig
from specray.engine.admission import Admission
from specray.engine.async_engine import OutputBuffer
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.request import Emitted, Request
from specray.engine.scheduler import Scheduler
from specray.errors import QueueFullError, SpecRayError
from specray.metrics import Snapshot
from specray.outputs import FinishReason, RequestOutput
from specray.server.routing.messages import DesiredDrafter, Item, Refusal, RouterHeartbeat, RouterInfo
from specray.step import RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes

CALL_S, ITEM_S = 0.001, 0.0003  # one way of a call through Ray Serve, and of a streamed item
HEARTBEAT_S = 0.5  # as a router's
OUTPUT_S = 0.1  # for which tokens of a stream are held; a server's default is less
RETRY_AFTER_S = 2
NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0)


class Hardware(NamedTuple):
    """What an engine computes with."""

    costs: StepCosts
    capacity: Capacity
    accepted: float  # probability that a draft is accepted, if the one before it was


class SimulatedEngine:
    """One engine behind its router, as ingresses call it (`specray.server.routing.client.RouterHandle`)."""

    def __init__(self, replica_id: str, node_id: str, config: EngineConfig, hardware: Hardware, seed: int) -> None:
        self.replica_id = replica_id
        self.is_silent = False  # its machine is gone: nothing answers, and nothing is closed
        self.num_submits = 0
        self._loop = asyncio.get_running_loop()
        self._hardware, self._random = hardware, Random(seed)
        self._scheduler = Scheduler(config, hardware.capacity)
        self._requests: dict[str, Request] = {}
        self._admission = Admission(config, hardware.capacity, self._scheduler, self._requests)
        self._connections = Connections(self._abort, 1.0, self._loop.time)
        self._buffer = OutputBuffer(OUTPUT_S, self._loop.time)
        self._info = RouterInfo(
            "simulated",
            hardware.capacity.context_length,
            hardware.capacity.vocab_size,
            0,
            0,
            [],
            "",
            True,
            (node_id,),
            node_id,
        )
        self._is_computing = False
        self._token_at = self._loop.time()
        self._num_tokens = self._num_finished = 0
        self._busy_s = 0.0
        self._is_full = False
        self._beat()

    # What a router does.

    async def outputs(self, connection_id: str) -> AsyncIterator[Item]:
        await self._travel(CALL_S)
        async for item in self._connections.stream(connection_id, self._info):
            await self._travel(ITEM_S)
            yield item

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        await self._travel(CALL_S)
        self.num_submits += 1
        try:
            for request in requests:
                self._admission.check(request)
        except SpecRayError as error:
            self._report_queue()
            return Refusal(error.status, str(error), None, RETRY_AFTER_S)
        self._connections.add(connection_id, [request.request_id for request in requests])
        for spec in requests:
            queued = self._requests[spec.request_id] = self._admission.request_of(spec, self._loop.time())
            self._scheduler.add(queued)
        self._report_queue()
        self._step()
        await self._travel(CALL_S)
        return None

    async def abort(self, request_ids: list[str]) -> None:
        await self._travel(CALL_S)
        self._connections.remove(request_ids)
        self._abort(request_ids)

    async def renew(self, connection_id: str, num_refused: int, num_poison: int) -> bool:
        del num_refused, num_poison
        await self._travel(CALL_S)
        return self._connections.renew(connection_id)

    async def stats(self) -> Snapshot:
        return {}

    async def drafter(self) -> dict[str, Any]:
        return {}

    async def apply(self, desired: DesiredDrafter) -> Refusal | None:
        del desired
        return Refusal(409, "the drafters of simulated engines are not replaced", None)

    async def drain(self) -> int:
        return len(self._requests)

    async def abort_of(self, tenant: str, name: str | None) -> None:
        specs = [request.spec for request in self._requests.values()]
        self._abort([spec.request_id for spec in specs if spec.tenant == tenant and name in (None, spec.name)])

    async def flush_cache(self) -> None:
        self._scheduler.cache.evict(self._scheduler.cache.num_idle)

    # What the simulation asks.

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def sample(self) -> Sample:
        """Its report to the autoscaling policy."""
        waiting = self._scheduler.waiting.num_waiting
        running = len(self._scheduler.running)
        return Sample(self._loop.time(), waiting, running, self._num_tokens, self._busy_s, self._num_finished)

    async def _travel(self, seconds: float) -> None:
        if self.is_silent:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)

    def _beat(self) -> None:
        if self.is_silent:
            return
        self._send_heartbeat()
        self._connections.expire(10.0)
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _send_heartbeat(self) -> None:
        pool = self._scheduler.pool
        idle = self._scheduler.cache.num_idle
        usage = 1 - (pool.num_free + idle) / pool.num_usable
        refusal = self._queue_refusal()
        self._is_full = refusal is not None
        self._connections.send_heartbeat(
            RouterHeartbeat(usage, None, self._loop.time() - self._token_at, refusal=refusal)
        )

    def _queue_refusal(self) -> Refusal | None:
        try:
            self._admission.check_queue()
        except QueueFullError as error:
            return Refusal(error.status, str(error), None, RETRY_AFTER_S)
        return None

    def _report_queue(self) -> None:
        if (self._queue_refusal() is not None) != self._is_full:
            self._send_heartbeat()

    # What an engine does.

    def _step(self) -> None:
        """Begin a step, if none is being computed and there is something to do."""
        if self._is_computing or self.is_silent:
            return
        plan = self._scheduler.schedule()
        if plan is None:
            return
        self._is_computing = True
        seconds = self._hardware.costs.seconds(plan)
        self._busy_s += seconds
        self._loop.call_later(seconds, self._end_step, plan)

    def _end_step(self, plan: StepPlan) -> None:
        self._is_computing = False
        if self.is_silent:
            return
        by_slot = {request.slot: request for request in self._scheduler.running}
        rows = [self._result(row, by_slot.get(row.slot)) for row in plan.rows]
        outputs = [
            self._commit(emitted) for emitted in self._scheduler.emitted(plan, StepResult(plan.step_id, rows, NO_TIMES))
        ]
        if any(output.token_ids for output in outputs):
            self._token_at = self._loop.time()
        self._connections.deliver(self._buffer.add(outputs))
        self._report_queue()
        self._step()

    def _result(self, row: ScheduledRequest, request: Request | None) -> RequestResult:
        if request is None or not request.in_flight[0].samples:
            return RequestResult(row.slot, [], 0, None, None)
        num_drafts = row.draft_limit.num_tokens if request.num_output_tokens else 0
        num_accepted = 0
        while num_accepted < num_drafts and self._random.random() < self._hardware.accepted:
            num_accepted += 1
        tokens = [self._random.randrange(self._hardware.capacity.vocab_size) for _ in range(num_accepted + 1)]
        return RequestResult(row.slot, tokens, num_drafts, None, None, list(range(1, num_accepted + 1)))

    def _commit(self, emitted: Emitted) -> RequestOutput:
        request = emitted.request
        num_kept = min(len(emitted.result.token_ids), request.max_length - len(request.token_ids))
        self._scheduler.commit(emitted, num_kept)
        self._num_tokens += num_kept
        is_last = len(request.token_ids) >= request.max_length
        if is_last:
            self._end(request)
        reason = FinishReason.LENGTH if is_last else None
        tokens = emitted.result.token_ids[:num_kept]
        return RequestOutput(request.request_id, tokens, "", None, reason, None, None, request.usage())

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self._end(request)

    def _end(self, request: Request) -> None:
        self._scheduler.finish(request)
        del self._requests[request.request_id]
        self._num_finished += 1
