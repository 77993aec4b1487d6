"""The Router deployment: one replica runs one engine, its step loop in a thread, and streams outputs to the ingresses.

It handles no HTTP and tokenizes no prompts, because a busy event loop would hold the interpreter lock that the step
loop needs.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.autoscaling import autoscaling_stats
from cluster.config import AppConfig
from cluster.engine.connections import Connections
from cluster.engine.executor import RayExecutor
from cluster.engine.metrics import AcceptanceWindow, Backoff, EngineSizes, LogReporter, RayExporter
from cluster.engine.reconciler import DrafterReconciler, drafter_report
from cluster.process_settings import set_log_level
from specray.engine.async_engine import AsyncEngine
from specray.engine.audit import Auditor
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.request_log import RequestLog
from specray.errors import EngineDeadError, QueueFullError, SpecRayError
from specray.heartbeat import LocalHeartbeat
from specray.metrics import Snapshot, number
from specray.models.files import target_folder
from specray.models.tokenizer import load_tokenizer
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from specray.server.config import ServerConfig
from specray.server.routing.messages import ConnectionEnd, DesiredDrafter, Item, Refusal, RouterHeartbeat, RouterInfo

HEARTBEAT_INTERVAL_S = 0.5  # to the ingresses
HOST_STEP_S = 5.0  # of a step, beside the ranks' part, after which the step loop hangs
PROBE_AFTER_S = 2.0  # without a token
HEALTH_CHECK_TIMEOUT_S = 3.0  # Serve checks every second until it is about to stop the replica
HEARTBEATS_IN_WINDOW = 20  # window of the acceptance length and of Retry-After
LAST_OUTPUT_S = 0.5  # for the error to reach the ingresses before the process exits
STOPPED = "the engine was stopped"
NOT_CONNECTED = "the engine was restarted; try again in a few seconds"

logger = logging.getLogger("ray.serve")


class Router:
    """One engine. Every request ends with exactly one final output, or with an exception in its ingress's stream.

    `exit_process` is replaced by tests.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, exit_process: Callable[[int], object] = os._exit
    ) -> None:
        # Serve counts the replica as started when this returns. The thread keeps the event loop free until then.
        set_log_level(config.server.log_level)
        self._config = config
        self._exit_process = exit_process
        self._error: str | None = None
        self._background: list[asyncio.Task[None]] = []
        self._replica_id = _own_replica_id()
        self._executor, engine = await asyncio.to_thread(_start_engine, config)
        self._loop = asyncio.get_running_loop()
        self._request_log = _request_log(config.server)
        if (log := self._request_log) is not None:
            engine.requests.on_finish = lambda request: log.add(request, engine.drafter.name)
        if config.server.audit and _can_audit(engine):
            keep = log.add if log is not None else lambda *_: None
            engine.requests.auditor = Auditor(config.server.audit, engine.stats, Random(), keep)
        self._engine = AsyncEngine(engine, self._deliver_from_thread, config.server.stream_interval_ms / 1000)
        self._connections = Connections(self._engine.abort, config.server.metrics_interval_s)
        self._info = _info(config, engine, self._executor)
        self._reconciler: DrafterReconciler | None = None
        if config.replaces_drafters:
            drafter = self._executor.drafter
            self._reconciler = DrafterReconciler(config.speculative, self._info.max_draft_tokens, drafter, self._engine)
        self._acceptance_length: float | None = None
        self._acceptance_window = AcceptanceWindow(HEARTBEATS_IN_WINDOW)
        self._is_draining = False
        self._is_full = False  # as last sent to the ingresses
        self._backoff = Backoff(HEARTBEATS_IN_WINDOW, time.monotonic)
        self._tokens = LocalHeartbeat()  # beats when the engine generates a token
        self._health_checks = LocalHeartbeat()
        self._probes: set[str] = set()  # request IDs of unfinished probes
        self._engine.start()
        self._background = [asyncio.create_task(work) for work in (self._maintain(), self._heartbeat_loop())]
        for task in self._background:
            task.add_done_callback(self._notice_end)
        logger.info("engine ready: %s", self._info.summary())

    async def __del__(self) -> None:
        """Serve awaits this when the replica stops, after its calls have ended."""
        if not self._background:  # the engine did not start
            return
        self._error = STOPPED  # so that the end of a rank is no failure
        for task in self._background:
            task.cancel()
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._executor.stop)
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)

    # `to` is the replica that a call is addressed to. If that replica is gone, Serve sends the call to another one,
    # which refuses it.

    async def outputs(self, connection_id: str, to: str | None = None) -> AsyncIterator[Item]:
        """The stream of one ingress replica: `RouterInfo`, then heartbeats and outputs. Ends only by raising."""
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
        """Queue requests, all or none. Returns the reason if they are refused."""
        if connection_id not in self._connections or not self._is_addressee(to):
            return Refusal(EngineDeadError.status, NOT_CONNECTED, None)
        self._connections.add(connection_id, [request.request_id for request in requests])
        try:
            for index, request in enumerate(requests):  # noqa: B007  # used on refusal
                self._engine.submit(request)
        except SpecRayError as error:
            self._connections.remove(request.request_id for request in requests)
            self._engine.abort([request.request_id for request in requests[:index]])
            return self._refusal(error)
        finally:
            self._report_queue()
        return None

    async def abort(self, request_ids: list[str], to: str | None = None) -> None:  # noqa: ARG002  # ids are unique
        """Abort requests. They get no further output."""
        self._connections.remove(request_ids)
        self._engine.abort(request_ids)

    async def renew(
        self,
        connection_id: str,
        num_refused: int,
        num_poison: int,
        to: str | None = None,  # noqa: ARG002  # connection IDs are unique
    ) -> bool:
        """Renew a connection's lease, and count requests that its ingress refused or gave up as poison.

        False for an unknown connection.
        """
        self._engine.add_refused(num_refused)
        self._engine.add_poison(num_poison)
        return self._connections.renew(connection_id)

    async def stats(self, to: str | None = None) -> Snapshot:
        self._check_addressee(to)
        return self._engine.stats()

    async def drafter(self, to: str | None = None) -> dict[str, Any]:
        """A report of the drafter. Only with `config.replaces_drafters`."""
        self._check_addressee(to)
        return drafter_report(self._executor.drafter.state, self._acceptance_length, self._engine.stats())

    async def apply(self, desired: DesiredDrafter, to: str | None = None) -> Refusal | None:
        """Replace the drafter, and return when the new one is in use. Only with `config.replaces_drafters`."""
        self._check_addressee(to)
        assert self._reconciler is not None
        refusal = await asyncio.to_thread(self._reconciler.apply, desired)
        self._info = self._info._replace(max_draft_tokens=self._reconciler.max_draft_tokens)
        self._connections.send_info(self._info)
        self._send_heartbeat(self._engine.stats())  # the next change at another ingress begins with this drafter
        return refusal

    async def drain(self, to: str | None = None) -> int:
        """Report in all heartbeats from now on that the application is about to stop.

        Returns the number of unfinished requests.
        """
        self._check_addressee(to)
        if not self._is_draining:
            self._is_draining = True
            self._send_heartbeat(self._engine.stats())
        return self._connections.num_requests

    async def abort_of(self, tenant: str, name: str | None, to: str | None = None) -> None:
        """See `AsyncEngine.abort_of`."""
        self._check_addressee(to)
        self._engine.abort_of(tenant, name)

    async def flush_cache(self, to: str | None = None) -> None:
        self._check_addressee(to)
        self._engine.flush_cache()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, which passes the result to the autoscaling policy."""
        return autoscaling_stats(self._engine.stats())

    async def check_health(self) -> None:
        """Called by Serve every second. It replaces the replica if this raises."""
        self._health_checks.beat()
        self._raise_if_dead()

    @property
    def _is_stopping(self) -> bool:
        """Whether Serve no longer checks health. It is then about to stop the replica, and no renewals arrive."""
        return self._health_checks.is_overdue(HEALTH_CHECK_TIMEOUT_S)

    @property
    def _since_token_s(self) -> float:
        """Seconds since the engine last generated a token; infinite before the first."""
        return self._tokens.silence_s if self._tokens.has_beaten else inf

    def _refusal(self, error: SpecRayError) -> Refusal:
        is_full = isinstance(error, QueueFullError)
        retry_after_s = self._backoff.retry_after_s(self._engine.stats()) if is_full else None
        param, code, overflow = (getattr(error, name, None) for name in ("param", "code", "overflow"))
        return Refusal(error.status, str(error), param, retry_after_s, code, overflow)

    def _is_addressee(self, to: str | None) -> bool:
        return to is None or self._replica_id in (None, to)

    def _check_addressee(self, to: str | None) -> None:
        if not self._is_addressee(to):
            raise EngineDeadError(f"the replica {to} has ended; this is {self._replica_id}")

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error)

    def _die(self, reason: str) -> None:
        """End every stream with an error and exit. Serve replaces a dead replica sooner than an unhealthy one."""
        if self._error is not None:
            return
        self._error = reason
        logger.error("the engine died: %s; this replica exits", reason)
        computing = self._engine.computing
        for request in computing:
            logger.error(
                "the engine computed %s: %d prompt and %d output tokens, tenant %r, %d engines lost before",
                request.request_id,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.spec.tenant,
                request.spec.num_deaths,
            )
        was_alone = len(computing) == 1 and computing[0].is_suspect
        # An engine that fails between two steps may do so for any request.
        ids = [request.request_id for request in computing] or None
        self._connections.fail(ConnectionEnd(reason, ids, was_alone))
        threading.Thread(target=self._executor.close, daemon=True).start()  # kills frozen processes, too
        self._loop.call_later(LAST_OUTPUT_S, self._exit_process, 1)

    def _notice_end(self, task: asyncio.Task[None]) -> None:
        """An engine whose failures nobody notices must not go on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the router failed", exc_info=error)
            self._die(f"the router failed: {type(error).__name__}: {error}")

    def _deliver_from_thread(self, outputs: list[RequestOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs, self._engine.error)

    def _deliver(self, outputs: list[RequestOutput], engine_error: str | None) -> None:
        if engine_error is not None:
            self._die(engine_error)
            return
        try:
            self._connections.deliver(outputs)
            self._report_queue()
        except Exception as error:  # these requests would wait for ever
            logger.exception("outputs cannot be delivered")
            self._die(f"the router failed: {type(error).__name__}: {error}")
        if any(output.token_ids for output in outputs):
            self._tokens.beat()
        self._probes.difference_update(output.request_id for output in outputs if output.finish_reason)

    async def _heartbeat_loop(self) -> None:
        while True:
            if self._since_token_s > PROBE_AFTER_S and not self._probes:
                self._probe()
            snapshot = self._engine.stats()
            self._backoff.record(snapshot)
            self._acceptance_length = self._acceptance_window.record(snapshot)
            self._send_heartbeat(snapshot)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _report_queue(self) -> None:
        """Send a heartbeat when the queue becomes full or has space again. Ingresses refuse requests in between."""
        if (self._engine.queue_error() is not None) != self._is_full:
            self._send_heartbeat(self._engine.stats())

    def _send_heartbeat(self, snapshot: Snapshot) -> None:
        error = self._engine.queue_error()
        self._is_full = error is not None
        heartbeat = RouterHeartbeat(
            kv_usage=round(number(snapshot, "specray_kv_cache_usage_perc"), 2),
            acceptance_length=self._acceptance_length,
            since_token_s=self._since_token_s,
            desired=self._reconciler.desired if self._reconciler else None,
            is_draining=self._is_draining,
            refusal=self._refusal(error) if error is not None else None,
            drafter_absence=self._executor.drafter_absence,
        )
        self._connections.send_heartbeat(heartbeat)

    def _probe(self) -> None:
        """Submit a request for one token, to show that the engine works."""
        request_id = f"probe-{time.monotonic_ns()}"
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        with contextlib.suppress(SpecRayError):  # a full queue generates tokens anyway, a dead engine is detected
            self._engine.submit(EngineRequest(request_id, [0], params, is_probe=True))
            self._probes.add(request_id)

    async def _maintain(self) -> None:
        exporter = RayExporter()
        sizes = EngineSizes(self._info.num_kv_tokens, self._executor.capacity.has_graphs)
        reporter = LogReporter(self._config.server.log_interval_s, sizes, time.monotonic)
        reporter.report(self._engine.stats())
        while True:
            await asyncio.sleep(self._config.server.metrics_interval_s)
            snapshot = self._engine.stats()
            exporter.export(snapshot)
            reporter.report(snapshot)
            if not self._is_stopping:
                self._connections.expire(self._config.server.lease_s)
            if self._engine.step_seconds > (limit_s := self._config.server.step_timeout_s + HOST_STEP_S):
                self._die(f"a step did not end within {limit_s:g} s, although the ranks run")
            if failure := self._engine.error or self._executor.failure():
                self._die(failure)


def _own_replica_id() -> str | None:
    """This replica's ID; None outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return None


def _start_engine(config: AppConfig) -> tuple[RayExecutor, Engine]:
    # Downloaded and converted by this process once, before the ranks load it.
    folder = target_folder(config, progress=True)
    tokenizer = load_tokenizer(folder).backend_tokenizer
    ranks = config.tp_size, config.draft_ranks(config.speculative)
    logger.info("loading %s on %d ranks, its drafter on %d", config.model_name, *ranks)
    executor = RayExecutor(config)
    return executor, Engine(config.engine, executor, tokenizer)


def _can_audit(engine: Engine) -> bool:
    """Whether texts may be compared at all; the log says why not."""
    if not engine.capacity.has_one_text:
        logger.warning("server.audit has no effect: this target's logits depend on the batch, so texts may differ")
    return engine.capacity.has_one_text


def _request_log(server: ServerConfig) -> RequestLog | None:
    if server.request_log is None:
        return None
    max_bytes = server.request_log_mib * 2**20
    return RequestLog(Path(server.request_log), server.request_log_tenants, max_bytes, server.request_log_redacted)


def _info(config: AppConfig, engine: Engine, executor: RayExecutor) -> RouterInfo:
    capacity = engine.capacity
    return RouterInfo(
        model=config.model_name,
        context_length=engine.admission.max_length,
        vocab_size=capacity.vocab_size,
        num_kv_tokens=(capacity.num_blocks - 1) * config.page_size,
        max_draft_tokens=capacity.max_draft_tokens,
        eos_token_ids=capacity.eos_token_ids,
        dtype=capacity.dtype,
        has_one_text=capacity.has_one_text,
        rank_nodes=executor.rank_nodes,
        node_id=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
        without_graphs=capacity.without_graphs,
        sums_over_ranks=capacity.sums_over_ranks,
        mps=executor.mps,
    )
