"""The requests of an engine from the queue to their last output: how they enter, and how they end.

`engine` runs their steps. One that neither starts nor ends a request calls nothing here.
"""

import time
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer

from specray.config import EngineConfig
from specray.engine.admission import Admission
from specray.engine.audit import Auditor
from specray.engine.detokenizer import TextStream
from specray.engine.draft_tracer import DraftTracer
from specray.engine.drafter_in_use import DrafterInUse
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.request import Request
from specray.engine.request_recorder import RequestRecorder
from specray.engine.scheduler import Scheduler
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason, RequestOutput, RequestTimes


class LiveRequests:
    """Requests that have not ended, by ID. Used from the engine's thread, except where it says otherwise."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        scheduler: Scheduler,
        drafter: DrafterInUse,
        stats: EngineStats,
        tokenizer: Tokenizer,
    ) -> None:
        self._scheduler, self._drafter, self.record = scheduler, drafter, RequestRecorder(stats)
        self._tokenizer, self._eos_token_ids = tokenizer, capacity.eos_token_ids
        self.by_id: dict[str, Request] = {}
        self.texts: dict[str, TextStream] = {}
        self.tracers: dict[str, DraftTracer] = {}  # of those that ask for a trace
        self.outputs: list[RequestOutput] = []  # not returned yet; kept if a step fails
        self.admission = Admission(config, capacity, scheduler, self.by_id)
        self.auditor: Auditor | None = None  # set it before the first step
        self.on_finish: Callable[[Request], object] | None = None  # called in a step with each request that ended
        self._entering: Request | None = None  # is being queued

    @property
    def audit_in_s(self) -> float | None:
        """Seconds until an audit begins or continues, if no request arrives; None if there is none."""
        return None if self.auditor is None else self.auditor.wait_s

    @property
    def computing(self) -> list[Request]:
        """The requests being computed: if the engine ends now, one of them may be the cause. Thread-safe."""
        return self._scheduler.computing if self._entering is None else [self._entering]

    def enqueue(self, spec: EngineRequest) -> None:
        """Queue a request that passed `admission.check`."""
        request = self._entering = self.admission.request_of(spec, time.monotonic())
        max_new = request.max_length - request.num_prompt_tokens
        text = TextStream(
            self._tokenizer, spec.params, self._eos_token_ids, max_new, spec.traces_drafts, spec.prompt_token_ids
        )
        resumed = text.feed(spec.emitted_token_ids)  # the caller already has this text
        if spec.traces_drafts:
            self.tracers[spec.request_id] = DraftTracer(resumed)
        if self._drafter.selector is not None:
            self._drafter.selector.assign(request)
        self._scheduler.add(request)
        self.by_id[spec.request_id], self.texts[spec.request_id] = request, text
        self.record.queued(request)
        self._entering = None

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; the next step reports them. Unknown or finished ids are ignored."""
        found = (self.by_id.get(request_id) for request_id in request_ids)
        self.end_all((request for request in found if request is not None), FinishReason.ABORT)

    def abort_of(self, tenant: str, name: str | None) -> None:
        """End a tenant's requests of this name; all of its requests if `name` is None."""
        specs = [request.spec for request in self.by_id.values()]
        self.abort(spec.request_id for spec in specs if spec.tenant == tenant and name in (None, spec.name))

    def audit(self, auditor: Auditor) -> None:
        """Begin an audit while no client's request is there, and end those that have their results, or all of them."""
        is_idle = all(request.spec.is_probe for request in self.by_id.values())
        self.abort([name for name, audit in auditor.running.items() if audit.is_over or not is_idle])
        if is_idle and not self._scheduler.waiting and (spec := auditor.start()) is not None:
            self.enqueue(spec)

    def end_all(self, requests: Iterable[Request], reason: FinishReason, error: str | None = None) -> None:
        """End requests between two steps; the next step reports them."""
        for request in requests:
            self.outputs.append(self.end(request, reason, error))

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """Remove a request. Returns its last output, which has no tokens."""
        self._scheduler.finish(request)
        request.finish_reason = reason
        if self._drafter.selector is not None:
            self._drafter.selector.end(request)
        del self.by_id[request.request_id], self.texts[request.request_id]
        self.tracers.pop(request.request_id, None)
        self.record.finished(request, reason)
        if self.on_finish is not None:
            self.on_finish(request)
        if self.auditor is not None:
            self.auditor.sample(request, self._drafter.name)
        times = _times(request, time.monotonic(), time.time_ns()) if request.spec.reports_times else None
        return empty_output(request)._replace(finish_reason=reason, error=error, times=times)


def empty_output(request: Request) -> RequestOutput:
    """An output without tokens or text."""
    return RequestOutput(request.request_id, [], "", None, None, None, None, request.usage())


def _times(request: Request, now: float, now_ns: int) -> RequestTimes:
    """When the phases of a request began that ends at `now` on the engine's clock, which is `now_ns` since 1970."""

    def since_1970(moment: float) -> int:
        return now_ns - round((now - moment) * 1e9)

    started, first_token = (
        None if moment is None else since_1970(moment) for moment in (request.started, request.first_token)
    )
    return RequestTimes(since_1970(request.arrival), started, first_token, now_ns)
