"""What an engine counts and when: one method for each event in the life of a request, and for each step."""

import time
from collections.abc import Sequence

from specray.config import SpeculativeConfig
from specray.engine.acceptance_alarm import AcceptanceAlarm
from specray.engine.request import Emitted, Request
from specray.engine.scheduler import Scheduler
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason
from specray.step import DraftFault, StepResult


class StatsRecorder:
    """Writes to `stats`. Requests by which the server checks itself are not counted there."""

    def __init__(self, stats: EngineStats, speculative: SpeculativeConfig, lacks_cpu_kernels: bool) -> None:
        self._stats = stats
        self._probe_stats = EngineStats()  # never exported
        self._alarm = AcceptanceAlarm(stats)
        stats.set("specray_verification_is_lossy", speculative.is_lossy)
        stats.set("specray_acceptance_is_simulated", speculative.is_simulated)
        stats.set("specray_cpu_kernels_absent", lacks_cpu_kernels)

    def queued(self, request: Request) -> None:
        self._stats_of(request).add("specray_prompt_tokens_total", request.num_prompt_tokens)
        self._stats_of(request).add("specray_suspect_requests_total", request.is_suspect)

    def started(self, started: Sequence[Request]) -> None:
        """A step was planned, in which these requests have their first tokens computed."""
        for request in started:
            if request.num_preemptions == 0:
                stats, request.started = self._stats_of(request), time.monotonic()
                stats.observe("specray_request_queue_time_seconds", request.started - request.arrival)
                stats.add("specray_prefix_cache_queries_total", request.num_prompt_tokens)
                stats.add("specray_prefix_cache_hits_total", request.num_cached_tokens)

    def emitted(self, emitted: Emitted, num_kept: int, num_allowed: int, drafter: str) -> None:
        """A request has new tokens, of which its stop conditions kept the first `num_kept`.

        Its step was allowed `num_allowed` drafts for it, those of `drafter`.
        """
        request, stats = emitted.request, self._stats_of(emitted.request)
        stats.add("specray_generation_tokens_total", num_kept)
        before, request.last_token = request.last_token, time.monotonic()
        if before is not None:
            stats.observe("specray_inter_token_latency_seconds", request.last_token - before)
            stats.add("specray_draft_budget_tokens_total", num_allowed)
            result, num_accepted = emitted.result, num_kept - 1
            stats.accepted(result.num_draft_tokens, num_accepted)
            if result.num_draft_tokens > len(result.forced_nodes) and request.has_usual_trees:
                num_forced = sum(node in result.forced_nodes for node in result.accepted_nodes[:num_accepted])
                self._alarm.count_tree(drafter, num_accepted - num_forced, request.has_grammar)
            return
        request.first_token = request.last_token
        if not request.spec.emitted_token_ids:
            stats.observe("specray_time_to_first_token_seconds", request.first_token - request.arrival)

    def finished(self, request: Request, reason: FinishReason) -> None:
        stats, now = self._stats_of(request), time.monotonic()
        stats.add_labelled("specray_request_finished_total", reason.value)
        stats.observe("specray_e2e_request_latency_seconds", now - request.arrival)
        stats.observe("specray_request_prompt_tokens", request.num_prompt_tokens)
        stats.observe("specray_request_generation_tokens", request.num_output_tokens)
        if request.first_token is not None and request.num_output_tokens > 1:
            gap = (now - request.first_token) / (request.num_output_tokens - 1)
            stats.observe("specray_time_per_output_token_seconds", gap)

    def step(self, result: StepResult, seconds: float) -> None:
        """A step took `seconds`, the engine's own part included."""
        self._stats.add("specray_steps_total")
        for kind in result.draft_faults:
            if kind == DraftFault.LATE:
                self._stats.add("specray_late_drafts_total")
            else:
                self._stats.add_labelled("specray_draft_faults_total", kind)
        phases = self._stats.labelled["specray_step_seconds_total"]
        for phase, spent in zip(result.times._fields, result.times, strict=True):
            phases[phase] += spent
        phases["host"] += max(0.0, seconds - sum(result.times))

    def drafter(self, name: str | None) -> None:
        """Another drafter is used from now on."""
        self._stats.name_drafter(name)
        self._alarm.reset()

    def gauges(self, scheduler: Scheduler) -> None:
        """Bring the gauges up to date, before a snapshot."""
        usable, cache = scheduler.pool.num_usable, scheduler.cache
        held = usable - scheduler.pool.num_free - cache.num_idle
        num_audits = sum(request.spec.is_audit for request in scheduler.running)
        self._stats.set("specray_num_requests_running", len(scheduler.running) - num_audits)
        self._stats.set("specray_num_requests_waiting", len(scheduler.waiting))
        self._stats.set("specray_kv_cache_usage_perc", held / usable)
        self._stats.set("specray_kv_cache_cached_perc", cache.num_idle / usable)
        self._stats.set("specray_num_preemptions_total", scheduler.slots.num_preemptions)

    def _stats_of(self, request: Request) -> EngineStats:
        return self._probe_stats if request.spec.is_probe else self._stats
