"""The engine: `step` schedules, runs and commits one step of all running requests.

`scheduler` plans the steps, an `Executor` runs them, and `detokenizer` makes the text. `async_engine` runs the loop.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

from tokenizers import Tokenizer

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.admission import Admission
from specray.engine.audit import Auditor
from specray.engine.detokenizer import TextStream
from specray.engine.draft_budget import DraftBudget, StepTimer, make_budget
from specray.engine.draft_tracer import DraftTracer
from specray.engine.drafter_selection.selector import DrafterSelector
from specray.engine.executor import Executor
from specray.engine.recorder import StatsRecorder
from specray.engine.request import Emitted, EngineRequest, Request
from specray.engine.scheduler import Scheduler
from specray.engine.stats import EngineStats
from specray.engine.step_times import MeasuredSpeedup
from specray.outputs import FinishReason, RequestOutput
from specray.step import BucketSeconds, StepPlan


class Engine:
    """Continuous batching over one executor; used from one thread."""

    def __init__(self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer) -> None:
        self.config = config
        self.executor = executor
        self.capacity = executor.capacity
        self.scheduler = Scheduler(config, self.capacity)
        self._requests: dict[str, Request] = {}
        self.admission = Admission(config, self.capacity, self.scheduler, self._requests)
        self.stats = EngineStats(config.speculative.drafter_name)
        self._record = StatsRecorder(self.stats, config.speculative, self.capacity.lacks_cpu_kernels)
        self._tokenizer = tokenizer
        self._texts: dict[str, TextStream] = {}
        self._selector = self._make_selector(config.speculative)  # None until there are several drafters
        self._tracers: dict[str, DraftTracer] = {}  # of the requests that ask for a trace
        self._in_flight: deque[StepPlan] = deque()  # submitted and not collected
        self._speedup = MeasuredSpeedup(self.stats)
        self._timer = StepTimer(self._speedup.record)
        self._bucket_seconds: Sequence[BucketSeconds] = ()  # of the last result that had any
        self._pending_outputs: list[RequestOutput] = []  # not returned yet; kept if a step fails
        self._entering: Request | None = None  # is being queued
        self.drafter_name = config.speculative.drafter_name or "none"
        self.auditor: Auditor | None = None  # set it before the first step
        self.on_finish: Callable[[Request], object] | None = None  # called in `step` with each request that ended

    @property
    def has_work(self) -> bool:
        has_requests = bool(self._requests or self._pending_outputs)
        return has_requests or self.audit_in_s == 0.0 or bool(self._in_flight) or self.scheduler.has_freed_slots

    @property
    def audit_in_s(self) -> float | None:
        """Seconds until an audit begins or continues, if no request arrives; None if there is none."""
        return None if self.auditor is None else self.auditor.wait_s

    def add_request(self, spec: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError; then nothing was queued."""
        self.admission.check(spec)
        self.enqueue(spec)

    def enqueue(self, spec: EngineRequest) -> None:
        """Queue a request that passed `admission.check`."""
        request = self._entering = self.admission.request_of(spec, time.monotonic())
        eos_ids, max_new = self.capacity.eos_token_ids, request.max_length - request.num_prompt_tokens
        text = TextStream(self._tokenizer, spec.params, eos_ids, max_new, spec.traces_drafts, spec.prompt_token_ids)
        resumed = text.feed(spec.emitted_token_ids)  # the caller already has this text
        if spec.traces_drafts:
            self._tracers[spec.request_id] = DraftTracer(resumed)
        if self._selector is not None:
            self._selector.assign(request)
        self.scheduler.add(request)
        self._requests[spec.request_id], self._texts[spec.request_id] = request, text
        self._record.queued(request)
        self._entering = None

    @property
    def computing(self) -> list[Request]:
        """The requests being computed: if the engine ends now, one of them may be the cause. Thread-safe."""
        return self.scheduler.computing if self._entering is None else [self._entering]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; the next `step` reports them. Unknown or finished ids are ignored."""
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self._pending_outputs.append(self._end(request, FinishReason.ABORT))

    def abort_of(self, tenant: str, name: str | None) -> None:
        """End a tenant's requests of this name; all of its requests if `name` is None."""
        specs = [request.spec for request in self._requests.values()]
        self.abort(spec.request_id for spec in specs if spec.tenant == tenant and name in (None, spec.name))

    def step(self) -> list[RequestOutput]:
        """Run one step of every running request, and return the outputs of those that have any.

        With two plans in flight, the ranks compute the next step while the outputs of this one are handled.
        """
        start = time.perf_counter()
        self._timer.start(start, is_busy=bool(self._in_flight))
        self._end_overdue()
        if self.auditor is not None:
            self._audit(self.auditor)
        while len(self._in_flight) < self.capacity.max_plans and self._submit():
            pass
        if self._in_flight:
            result, plan = self.executor.collect(), self._in_flight.popleft()
            assert result.step_id == plan.step_id, "a step failed, and the engine was used again"
            self._timer.end(time.perf_counter(), plan, result, self.scheduler.drafts.budget)
            if result.drafter_is_new:
                self.scheduler.drafter_took_over()
            if result.bucket_seconds:
                self._bucket_seconds = result.bucket_seconds
                self.scheduler.drafts.budget.record_bucket_seconds(result.bucket_seconds)
            computed = self.scheduler.emitted(plan, result)
            is_audit = bool(computed) and all(emitted.request.spec.is_audit for emitted in computed)
            if self._selector is not None and not is_audit:
                self._selector.record_step(computed, result, self._timer.seconds)
            for emitted in computed:
                self._pending_outputs.append(self._commit(emitted))
            if not is_audit:
                self._record.step(result, time.perf_counter() - start)
        return self._take_outputs()

    def new_budget(self, speculative: SpeculativeConfig, max_draft_tokens: int) -> DraftBudget:
        """The budget for another drafter. Thread-safe; reads a file."""
        return make_budget(self.config, speculative, self.capacity._replace(max_draft_tokens=max_draft_tokens))

    def draft_with(
        self, speculative: SpeculativeConfig, max_draft_tokens: int, budget: DraftBudget | None = None
    ) -> None:
        """Plan for another drafter. The worker may switch earlier or later, because it truncates trees to the plan.

        `budget` is that of `new_budget`, which is called here if it is None.
        """
        drafts = self.scheduler.drafts
        drafts.budget = budget or self.new_budget(speculative, max_draft_tokens)
        if any(bucket.num_nodes > max_draft_tokens for bucket in self._bucket_seconds):  # else of smaller trees only
            drafts.budget.record_bucket_seconds(self._bucket_seconds)
        drafts.max_draft_tokens = max_draft_tokens
        self._timer = StepTimer(self._speedup.record)
        self._record.drafter(speculative.drafter_name)
        self.drafter_name = speculative.drafter_name or "none"
        if self._selector is None:
            self._selector = self._make_selector(speculative)
        else:
            self._selector.use(speculative)

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error, after the executor failed."""
        for request in list(self._requests.values()):
            self._pending_outputs.append(self._end(request, FinishReason.ERROR, error=message))
        return self._take_outputs()

    def update_gauges(self) -> None:
        """Bring the gauges of `stats` up to date; called before a snapshot."""
        self._record.gauges(self.scheduler)

    def _make_selector(self, speculative: SpeculativeConfig) -> DrafterSelector | None:
        if not speculative.drafters:
            return None
        return DrafterSelector(speculative, self._tokenizer.decode, self.stats, Random(0))

    def _submit(self) -> bool:
        """Plan a step and send it to the ranks. False if there is nothing to do before a result arrives."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        running = self.scheduler.running  # those that start are the last ones
        self._record.started(running[len(running) - len(plan.new_requests) :])
        self.executor.submit(plan)
        self._in_flight.append(plan)
        return True

    def _audit(self, auditor: Auditor) -> None:
        """Begin an audit while no client's request is there, and end those that have their results, or all of them."""
        is_idle = all(request.spec.is_probe for request in self._requests.values())
        self.abort([name for name, audit in auditor.running.items() if audit.is_over or not is_idle])
        if is_idle and not self.scheduler.waiting and (spec := auditor.start()) is not None:
            self.enqueue(spec)

    def _end_overdue(self) -> None:
        """Abort running and waiting requests past their deadline, in case their caller no longer can."""
        now = time.monotonic()
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            self._pending_outputs.append(
                self._end(request, FinishReason.ABORT, error="the request exceeded its time limit")
            )

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs if self.auditor is None else self.auditor.take(outputs)

    def _commit(self, emitted: Emitted) -> RequestOutput:
        """Cut a request's new tokens at its stop conditions and commit the rest; returns the output."""
        request, result = emitted.request, emitted.result
        if result.error is not None:
            return self._end(request, FinishReason.ERROR, error=result.error)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += result.prompt_logprobs or []
        if not result.token_ids:
            self.scheduler.commit(emitted, 0)
            return _empty_output(request)
        num_allowed = request.in_flight[0].num_drafts
        text = self._texts[request.request_id]
        cut = text.feed(result.token_ids)
        request.num_reasoning_tokens = text.num_reasoning_tokens
        self.scheduler.commit(emitted, cut.num_kept)
        drafter = (self._selector and self._selector.drafter_of(request)) or self.drafter_name
        self._record.emitted(emitted, cut.num_kept, num_allowed, drafter)
        output = RequestOutput(
            request.request_id,
            result.token_ids[: cut.num_kept],
            cut.text,
            logprobs=result.logprobs and result.logprobs[: cut.num_kept],
            finish_reason=None,
            stop_reason=None,
            error=None,
            usage=request.usage(),
            prompt_logprobs=request.prompt_logprobs,
            trace=result.tree and self._tracers[request.request_id].step(result.tree, result.accepted_nodes, cut),
        )
        request.prompt_logprobs = None
        if cut.finish_reason is None:
            return output
        times = self._end(request, cut.finish_reason).times
        return output._replace(finish_reason=cut.finish_reason, stop_reason=cut.stop_reason, times=times)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        self.scheduler.finish(request)
        request.finish_reason = reason
        if self._selector is not None:
            self._selector.end(request)
        del self._requests[request.request_id], self._texts[request.request_id]
        self._tracers.pop(request.request_id, None)
        self._record.finished(request, reason)
        if self.on_finish is not None:
            self.on_finish(request)
        if self.auditor is not None:
            self.auditor.sample(request, self.drafter_name)
        times = request.times(time.monotonic(), time.time_ns()) if request.spec.reports_times else None
        return _empty_output(request)._replace(finish_reason=reason, error=error, times=times)


def _empty_output(request: Request) -> RequestOutput:
    """An output without tokens or text."""
    return RequestOutput(request.request_id, [], "", None, None, None, None, request.usage())
