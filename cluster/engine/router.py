"""The host side of one engine as a Serve deployment: the step loop in a thread, its news to the ingresses.

No HTTP and no tokenising in this process: a busy event loop would take the interpreter from the step
thread. Not here: the engine (`specray.engine`), the ranks (`executor`), HTTP (`ingress`).
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.autoscaling import autoscaling_stats
from cluster.config import AppConfig
from cluster.engine.backoff import Backoff
from cluster.engine.connections import Connections
from cluster.engine.executor import RayExecutor
from cluster.engine.metrics import RayExporter, log_line
from cluster.engine.reconciler import DrafterReconciler, drafter_report
from cluster.log_level import set_log_level
from cluster.messages import DesiredDrafter, Item, Refusal, RouterHeartbeat, RouterInfo
from specray.engine.async_engine import AsyncEngine
from specray.engine.engine import Engine
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, QueueFullError, SpecRayError
from specray.metrics import Snapshot, number
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams

HEARTBEAT_INTERVAL_S = 0.5  # between two signs of life
PROBE_AFTER_S = 2.0  # without a token
UNASKED_S = 3.0  # without a question for our health, which comes every second
HEARTBEATS_IN_WINDOW = 20  # over which accept length and the pace of requests are measured
ACCEPTED = "specray_spec_decode_num_accepted_tokens_total"
LAST_OUTPUT_S = 0.5  # between telling the ingresses of a dead engine and leaving
NOT_CONNECTED = "the engine was restarted; try again in a few seconds"

logger = logging.getLogger("ray.serve")


class Router:
    """One replica is one engine. Every request ends in one output, or with its ingress's stream in an exception."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, leave: Callable[[int], object] = os._exit
    ) -> None:
        # A replica counts as started once this returns; a thread keeps its event loop free meanwhile.
        set_log_level(config.server.log_level)
        self._config = config
        self._leave = leave
        self._death: str | None = None
        self._replica_id = _own_replica_id()
        self._executor, engine = await asyncio.to_thread(_start_engine, config)
        self._loop = asyncio.get_running_loop()
        self._engine = AsyncEngine(engine, self._deliver_from_thread)
        self._connections = Connections(self._engine.abort, time.monotonic)
        self._info = _info(config, engine, self._executor.rank_nodes)
        self._drafts: DrafterReconciler | None = None
        if config.replaces_drafters:
            drafter = self._executor.drafter
            self._drafts = DrafterReconciler(config.speculative, self._info.max_draft_tokens, drafter, self._engine)
        self._accept_length: float | None = None  # of late
        self._lengths = AcceptanceWindow(HEARTBEATS_IN_WINDOW)
        self._is_draining = False
        self._is_full = False  # as the ingresses were told
        self._backoff = Backoff(HEARTBEATS_IN_WINDOW, time.monotonic)
        self._token_at = 0.0  # on the monotonic clock
        self._asked_at = inf  # the same, for our health
        self._probes: set[str] = set()  # under way
        self._engine.start()
        self._supervisors = [asyncio.create_task(work) for work in (self._keep_house(), self._send_heartbeats())]
        logger.info("engine ready: %s", self._info)

    # Every call names the replica it is for: one whose addressee is gone arrives at another, and is refused.

    async def outputs(self, connection_id: str, to: str | None = None) -> AsyncIterator[Item]:
        """One ingress replica's stream: who we are, then one item per step. Ends with an exception only."""
        self._raise_if_dead()
        self._check_addressee(to)
        async for item in self._connections.stream(connection_id, self._info):
            yield item

    async def submit(
        self,
        connection_id: str,
        requests: list[EngineRequest],
        to: str | None = None,
    ) -> Refusal | None:
        """Queue requests, all or none."""
        if connection_id not in self._connections or not self._is_addressee(to):
            return Refusal(EngineDeadError.status, NOT_CONNECTED, None)
        self._connections.add(connection_id, [request.request_id for request in requests])
        try:
            for index, request in enumerate(requests):  # noqa: B007  # the refusal needs it
                self._engine.submit(request)
        except SpecRayError as error:
            self._connections.remove(request.request_id for request in requests)
            self._engine.abort([request.request_id for request in requests[:index]])
            return self._refusal(error)
        finally:
            self._tell_of_room()
        return None

    async def abort(self, request_ids: list[str], to: str | None = None) -> None:  # noqa: ARG002  # ids are unique
        """End requests nobody waits for any more; they get no further output."""
        self._connections.remove(request_ids)
        self._engine.abort(request_ids)

    async def renew(self, connection_id: str, num_refused: int, to: str | None = None) -> bool:  # noqa: ARG002  # as above
        """An ingress says that it lives, and what it refused for us since; False if its connection is not here."""
        self._engine.add_refused(num_refused)
        return self._connections.renew(connection_id)

    async def stats(self, to: str | None = None) -> Snapshot:
        self._check_addressee(to)
        return self._engine.stats()

    async def drafter(self, to: str | None = None) -> dict[str, Any]:
        """What drafts now, where drafters can be replaced."""
        self._check_addressee(to)
        return drafter_report(self._executor.drafter.state, self._accept_length, self._engine.stats())

    async def apply(self, desired: DesiredDrafter, to: str | None = None) -> Refusal | None:
        """Put the drafter that is wished for in the place of the one there is; returns when that is done."""
        self._check_addressee(to)
        assert self._drafts is not None, "asked of a router that cannot"
        refusal = await asyncio.to_thread(self._drafts.apply, desired)
        self._info = self._info._replace(max_draft_tokens=self._drafts.max_draft_tokens)
        self._connections.send(self._info)
        return refusal

    async def drain(self, to: str | None = None) -> None:
        """The application is about to be stopped: say so to every ingress, in all pulses from now on."""
        self._check_addressee(to)
        self._is_draining = True
        self._heartbeat(self._engine.stats())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the autoscaling policy."""
        return autoscaling_stats(self._engine.stats())

    async def check_health(self) -> None:
        """Serve asks every second and replaces the replica when this raises."""
        self._asked_at = time.monotonic()
        self._raise_if_dead()

    @property
    def _is_stopping(self) -> bool:
        """Serve asks no more: then it is about to stop us, and lets no call reach us, renewals of leases neither."""
        return time.monotonic() - self._asked_at > UNASKED_S

    def _refusal(self, error: SpecRayError) -> Refusal:
        is_full = isinstance(error, QueueFullError)
        retry_after_s = self._backoff.retry_after_s(self._engine.stats()) if is_full else None
        return Refusal(error.status, str(error), getattr(error, "param", None), retry_after_s)

    def _is_addressee(self, to: str | None) -> bool:
        return to is None or self._replica_id in (None, to)

    def _check_addressee(self, to: str | None) -> None:
        if not self._is_addressee(to):
            raise EngineDeadError(f"the replica {to} is gone; this is {self._replica_id}")

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _die(self, reason: str) -> None:
        """End every stream with an error and leave: Serve replaces a gone replica sooner than an unhealthy one."""
        if self._death is not None:
            return
        self._death = reason
        logger.error("the engine died: %s; this replica leaves", reason)
        self._connections.fail(EngineDeadError(reason))
        threading.Thread(target=self._executor.close, daemon=True).start()  # what is left of it, frozen or not
        self._loop.call_later(LAST_OUTPUT_S, self._leave, 1)

    def _deliver_from_thread(self, outputs: list[RequestOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs, self._engine.error)

    def _deliver(self, outputs: list[RequestOutput], engine_error: str | None) -> None:
        if engine_error is None:
            self._connections.deliver(outputs)
            self._tell_of_room()
            if any(output.token_ids for output in outputs):
                self._token_at = time.monotonic()
            self._probes.difference_update(output.request_id for output in outputs if output.finish_reason)
        else:
            self._die(engine_error)

    async def _send_heartbeats(self) -> None:
        while True:
            if time.monotonic() - self._token_at > PROBE_AFTER_S and not self._probes:
                self._probe()
            snapshot = self._engine.stats()
            self._backoff.note(snapshot)
            self._accept_length = self._lengths.note(snapshot)
            self._heartbeat(snapshot)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _tell_of_room(self) -> None:
        """Say at once when the queue has filled up or has room again: ingresses refuse by themselves meanwhile."""
        if (self._engine.queue_error() is not None) != self._is_full:
            self._heartbeat(self._engine.stats())

    def _heartbeat(self, snapshot: Snapshot) -> None:
        error = self._engine.queue_error()
        self._is_full = error is not None
        heartbeat = RouterHeartbeat(
            kv_usage=number(snapshot, "specray_kv_cache_usage_perc"),
            acceptance_length=self._accept_length,
            since_token_s=time.monotonic() - self._token_at,
            desired=self._drafts.desired if self._drafts else None,
            is_draining=self._is_draining,
            refusal=self._refusal(error) if error is not None else None,
        )
        self._connections.send(heartbeat)

    def _probe(self) -> None:
        """Have a token made, as a request would."""
        request_id = f"probe-{time.monotonic_ns()}"
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        with contextlib.suppress(SpecRayError):  # a full queue or a dead engine: then there are others to look at
            self._engine.submit(EngineRequest(request_id, [0], params, is_probe=True))
            self._probes.add(request_id)

    async def _keep_house(self) -> None:
        exporter = RayExporter()
        reporter = LogReporter(self._config.server.log_interval_s, self._info.num_kv_tokens, time.monotonic)
        reporter.report(self._engine.stats())
        while True:
            await asyncio.sleep(self._config.server.metrics_interval_s)
            snapshot = self._engine.stats()
            exporter.export(snapshot)
            reporter.report(snapshot)
            if not self._is_stopping:
                self._connections.expire(self._config.server.lease_s)
            if failure := self._engine.error or self._executor.failure():
                self._die(failure)


class AcceptanceWindow:
    """Accept length over the last so many snapshots."""

    def __init__(self, size: int) -> None:
        self._counts: deque[tuple[float, float]] = deque(maxlen=size + 1)  # verify steps, accepted tokens

    def note(self, snapshot: Snapshot) -> float | None:
        """Tokens of a verify step, bonus included; None while there was none."""
        now = number(snapshot, "specray_verify_steps_total"), number(snapshot, ACCEPTED)
        self._counts.append(now)
        steps, accepted = (new - old for new, old in zip(now, self._counts[0], strict=True))
        return 1 + accepted / steps if steps else None


class LogReporter:
    """Writes one line per interval in which something happened."""

    def __init__(self, interval_s: float, num_kv_tokens: int, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._num_kv_tokens = num_kv_tokens
        self._clock = clock
        self._last: tuple[float, Snapshot] | None = None

    def report(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot; the first one only starts the clock."""
        now = self._clock()
        if self._last is None:
            self._last = now, snapshot
        since, before = self._last
        if now - since < self._interval_s:
            return
        if line := log_line(before, snapshot, now - since, self._num_kv_tokens):
            logger.info(line)
        self._last = now, snapshot


def _own_replica_id() -> str | None:
    """None outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return None


def _start_engine(config: AppConfig) -> tuple[RayExecutor, Engine]:
    # Resolved before any rank starts, so that one process converts or downloads, and the ranks find it done.
    folder = resolve_model(config.model, config.revision, config.load_format, progress=True)
    tokenizer = load_tokenizer(folder).backend_tokenizer
    executor = RayExecutor(config)
    return executor, Engine(config.engine, executor, tokenizer)


def _info(config: AppConfig, engine: Engine, rank_nodes: tuple[str, ...]) -> RouterInfo:
    capacity = engine.capacity
    return RouterInfo(
        model=config.model_name,
        context_length=engine.max_length,
        vocab_size=capacity.vocab_size,
        num_kv_tokens=(capacity.num_blocks - 1) * config.page_size,
        max_draft_tokens=capacity.max_draft_tokens,
        eos_token_ids=capacity.eos_token_ids,
        dtype=capacity.dtype,
        rank_nodes=rank_nodes,
    )
