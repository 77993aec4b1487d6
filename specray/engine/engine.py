"""The engine: `step` schedules, runs and commits one step of all running requests.

`scheduler` plans the steps, an `Executor` runs them, and `detokenizer` makes the text. `live_requests` queues and ends
requests, and `async_engine` runs the loop.
"""

import time
from collections import deque

from tokenizers import Tokenizer

from specray.config import EngineConfig
from specray.engine.drafter_in_use import DrafterInUse
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Executor
from specray.engine.live_requests import LiveRequests, empty_output
from specray.engine.recorder import StatsRecorder
from specray.engine.request import Emitted
from specray.engine.scheduler import Scheduler
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason, RequestOutput
from specray.step import StepPlan


class Engine:
    """Continuous batching over one executor; used from one thread."""

    def __init__(self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer) -> None:
        self.config, self.executor, self.capacity = config, executor, executor.capacity
        self.scheduler = Scheduler(config, self.capacity)
        self.stats = EngineStats(config.speculative.drafter_name)
        self._record = StatsRecorder(self.stats, config.speculative, self.capacity.lacks_cpu_kernels)
        self.drafter = DrafterInUse(
            config, self.capacity, self.scheduler.drafts, self.stats, self._record, tokenizer.decode
        )
        self.requests = LiveRequests(config, self.capacity, self.scheduler, self.drafter, self.stats, tokenizer)
        self.admission = self.requests.admission
        self._in_flight: deque[StepPlan] = deque()  # submitted and not collected

    @property
    def has_work(self) -> bool:
        has_requests = bool(self.requests.by_id or self.requests.outputs)
        is_auditing = self.requests.audit_in_s == 0.0
        return has_requests or is_auditing or bool(self._in_flight) or bool(self.scheduler.slots.freed)

    def add_request(self, spec: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError; then nothing was queued."""
        self.admission.check(spec)
        self.requests.enqueue(spec)

    def step(self) -> list[RequestOutput]:
        """Run one step of every running request, and return the outputs of those that have any.

        With two plans in flight, the ranks compute the next step while the outputs of this one are handled.
        """
        start, timer, selector = time.perf_counter(), self.drafter.timer, self.drafter.selector
        if timer is not None:
            timer.start(start, is_busy=bool(self._in_flight))
        self._end_overdue()
        if self.requests.auditor is not None:
            self.requests.audit(self.requests.auditor)
        while len(self._in_flight) < self.capacity.max_plans and self._submit():
            pass
        if self._in_flight:
            result, plan = self.executor.collect(), self._in_flight.popleft()
            assert result.step_id == plan.step_id, "a step failed, and the engine was used again"
            if timer is not None:
                timer.end(time.perf_counter(), plan, result, self.scheduler.drafts.budget)
            if result.drafter_is_new:
                self.scheduler.slots.drafter_took_over()
            if result.bucket_seconds:
                self.drafter.record_bucket_seconds(result.bucket_seconds)
            computed = self.scheduler.emitted(plan, result)
            is_audit = bool(computed) and all(emitted.request.spec.is_audit for emitted in computed)
            if selector is not None and timer is not None and not is_audit:
                selector.record_step(computed, result, timer.seconds)
            for emitted in computed:
                self.requests.outputs.append(self._commit(emitted))
            if not is_audit:
                self._record.step(result, time.perf_counter() - start)
        return self._take_outputs()

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error, after the executor failed."""
        self.requests.end_all(list(self.requests.by_id.values()), FinishReason.ERROR, message)
        return self._take_outputs()

    def update_gauges(self) -> None:
        """Bring the gauges of `stats` up to date; called before a snapshot."""
        self.requests.record.gauges(self.scheduler)

    def _end_overdue(self) -> None:
        """Abort running and waiting requests past their deadline, in case their caller no longer can."""
        now = time.monotonic()
        if overdue := [request for request in self.requests.by_id.values() if request.deadline <= now]:
            self.requests.end_all(overdue, FinishReason.ABORT, "the request exceeded its time limit")

    def _submit(self) -> bool:
        """Plan a step and send it to the ranks. False if there is nothing to do before a result arrives."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if plan.new_requests:  # the last ones that run
            self.requests.record.started(self.scheduler.running[-len(plan.new_requests) :])
        self.executor.submit(plan)
        self._in_flight.append(plan)
        return True

    def _commit(self, emitted: Emitted) -> RequestOutput:
        """Cut a request's new tokens at its stop conditions and commit the rest; returns the output."""
        request, result, selector = emitted.request, emitted.result, self.drafter.selector
        if result.error is not None:
            return self.requests.end(request, FinishReason.ERROR, result.error)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += result.prompt_logprobs or []
        if not result.token_ids:
            self.scheduler.commit(emitted, 0)
            return empty_output(request)
        num_allowed = request.in_flight[0].num_drafts
        text = self.requests.texts[request.request_id]
        cut = text.feed(result.token_ids)
        request.num_reasoning_tokens = text.num_reasoning_tokens
        self.scheduler.commit(emitted, cut.num_kept)
        drafter = (selector and selector.drafter_of(request)) or self.drafter.name
        self._record.emitted(emitted, cut.num_kept, num_allowed, drafter)
        trace = None
        if result.tree is not None:
            trace = self.requests.tracers[request.request_id].step(result.tree, result.accepted_nodes, cut)
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        ended = None if cut.finish_reason is None else self.requests.end(request, cut.finish_reason)
        return RequestOutput(
            request.request_id,
            result.token_ids[: cut.num_kept],
            cut.text,
            logprobs=result.logprobs and result.logprobs[: cut.num_kept],
            finish_reason=cut.finish_reason,
            stop_reason=cut.stop_reason,
            error=None,
            usage=request.usage(),
            prompt_logprobs=prompt_logprobs,
            trace=trace,
            times=ended and ended.times,
        )

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self.requests.outputs = self.requests.outputs, []
        return outputs if self.requests.auditor is None else self.requests.auditor.take(outputs)
