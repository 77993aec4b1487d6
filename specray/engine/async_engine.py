"""The engine's step loop in its own thread.

`deliver` is called in the loop's thread with the outputs of one or several steps; it must pass them on to the caller's
event loop.
Every submitted request ends in exactly one output with a finish reason, even if the loop fails, and the engine with it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from specray.config import SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.request import Request
from specray.errors import EngineDeadError, QueueFullError
from specray.metrics import Snapshot
from specray.outputs import FinishReason, RequestOutput, RequestUsage, merge_outputs

FLUSHED_BLOCKS = 1024  # of the prefix cache that are evicted between two steps; each takes some microseconds

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Thread-safe interface of an `Engine`; start it once, close it once.

    Callers only append to `_calls`, `_arrived` and `_unfinished`. The engine itself belongs to the loop's thread, so no
    caller waits for a step.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[list[RequestOutput]], None], stream_interval_s: float = 0.0
    ) -> None:
        """`stream_interval_s` is how long outputs may be held, see OutputBuffer."""
        self._engine = engine
        self._deliver = deliver
        self._buffer = OutputBuffer(stream_interval_s, time.monotonic)
        self._unfinished: dict[str, EngineRequest] = {}  # by id, until their last output is delivered
        self._arrived: deque[EngineRequest] = deque()  # not queued in the engine yet
        self._calls: deque[Callable[[], None]] = deque()  # to run in the loop's thread before the next step
        self._changed = threading.Condition()
        self._closing = False
        self._error: str | None = None
        self._step_began: float | None = None
        self._snapshot = engine.stats.snapshot()
        self._thread = threading.Thread(target=self._run, name="specray-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises QueueFullError, InvalidRequestError or EngineDeadError; then nothing was queued."""
        with self._changed:
            if self._error is not None or self._closing:
                raise EngineDeadError(self._error or "the engine is shutting down; send the request to another replica")
            try:
                self._engine.admission.check(request, arriving=self._arrived)
            except QueueFullError:
                self.add_refused(1)
                raise
            self._unfinished[request.request_id] = request
            self._arrived.append(request)
            self._calls.append(self._enqueue)
            self._changed.notify()

    def queue_error(self) -> QueueFullError | None:
        """The error that a new request of any tenant would get now; None if the queue has space."""
        with self._changed:
            try:
                self._engine.admission.check_queue(arriving=self._arrived)
            except QueueFullError as error:
                return error
        return None

    def add_refused(self, count: int) -> None:
        """Count requests refused for a full queue. Only the caller's thread writes this metric."""
        self._engine.stats.add("specray_requests_refused_total", count)

    def add_poison(self, count: int) -> None:
        """Count requests that were given up, because engines ended while they computed them."""
        self._engine.stats.add("specray_poison_requests_total", count)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early, with finish reason `abort`. Unknown or finished ids are ignored."""
        ended = list(request_ids)
        self._call(lambda: self._engine.requests.abort(ended))

    def draft_with(self, speculative: SpeculativeConfig, max_draft_tokens: int) -> None:
        """Plan for another drafter from the next step on. The caller waits while learnt costs are read from disk."""
        budget = self._engine.drafter.new_budget(speculative, max_draft_tokens)
        self._call(lambda: self._engine.drafter.replace(speculative, max_draft_tokens, budget))

    def abort_of(self, tenant: str, name: str | None) -> None:
        """End a tenant's requests of this name, or all of them, with finish reason `abort`."""
        self._call(lambda: self._engine.requests.abort_of(tenant, name))

    def flush_cache(self) -> None:
        """Evict all blocks that no running request uses from the prefix cache, some after each of the next steps."""
        self._call(lambda: self._evict(self._engine.scheduler.cache.num_idle))

    def stats(self) -> Snapshot:
        """Metrics as of the last step."""
        return self._snapshot

    @property
    def computing(self) -> list[Request]:
        """See `LiveRequests.computing`."""
        return self._engine.requests.computing

    @property
    def error(self) -> str | None:
        """Why the loop failed; None while it runs."""
        return self._error

    def close(self) -> None:
        """Stop the loop; unfinished requests end with an `error` output."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    @property
    def step_seconds(self) -> float:
        """How long the present step has taken; 0 between two steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._step_began = time.monotonic()
                self._publish(self._engine.step())
                self._step_began = None
            self._fail("the engine was shut down")
        except BaseException as error:  # the requests must end, whatever the error is; panics of Rust are no Exception
            logger.exception("the step loop failed")
            self._fail(str(error) or type(error).__name__)

    def _take_calls(self) -> bool:
        """Wait until there is work, then run the calls made meanwhile, in their order; False when closing."""
        with self._changed:
            while not (self._closing or self._calls or self._engine.has_work):
                self._changed.wait(self._engine.requests.audit_in_s)
            calls, self._calls = self._calls, deque()
        for call in calls:  # without the lock: callers must not wait for them
            call()
        return not self._closing

    def _enqueue(self) -> None:
        with self._changed:  # a request counts as arrived or as queued, and never as both or neither
            self._engine.requests.enqueue(self._arrived.popleft())

    def _evict(self, num_blocks: int) -> None:
        self._engine.scheduler.cache.evict(min(num_blocks, FLUSHED_BLOCKS))
        if (num_left := num_blocks - FLUSHED_BLOCKS) > 0:
            self._call(lambda: self._evict(num_left))

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self._engine.update_gauges()
        self._snapshot = self._engine.stats.snapshot()
        self._pass_on(outputs)

    def _pass_on(self, outputs: list[RequestOutput]) -> None:
        if ready := self._buffer.add(outputs):
            self._deliver(ready)
        for output in outputs:
            if output.finish_reason is not None:
                self._unfinished.pop(output.request_id, None)

    def _fail(self, message: str) -> None:
        """End every unfinished request with an error, also those that the engine has lost or cannot end."""
        with self._changed:
            self._error = message  # from here on `submit` refuses
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.fail_all(message)
            self._engine.update_gauges()
            self._snapshot = self._engine.stats.snapshot()
        except BaseException:
            logger.exception("the engine could not end its requests")
        ended = {output.request_id for output in outputs if output.finish_reason is not None}
        lost = [spec for request_id, spec in self._unfinished.items() if request_id not in ended]
        self._pass_on(outputs + [_failed(spec, message) for spec in lost])


def _failed(spec: EngineRequest, message: str) -> RequestOutput:
    """The last output of a request about which the engine says nothing."""
    usage = RequestUsage(len(spec.prompt_token_ids), 0, 0, 0, 0, 0, 0)
    return RequestOutput(spec.request_id, [], "", None, FinishReason.ERROR, None, message, usage)


class OutputBuffer:
    """Holds outputs for at most `interval_s` seconds. A request's first token and its end are never held."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._held: dict[str, RequestOutput] = {}  # by request ID, in order of arrival
        self._due = clock()

    def add(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Add a step's outputs. Returns what is to be delivered now: everything held, or nothing."""
        is_urgent = False
        for output in outputs:
            held = self._held.get(output.request_id)
            self._held[output.request_id] = output if held is None else merge_outputs(held, output)
            is_urgent |= output.finish_reason is not None or _has_first_token(output)
        if not self._held or not (is_urgent or self._clock() >= self._due):
            return []
        self._due = self._clock() + self._interval_s
        ready, self._held = list(self._held.values()), {}
        return ready


def _has_first_token(output: RequestOutput) -> bool:
    return 0 < output.usage.num_completion_tokens == len(output.token_ids)
