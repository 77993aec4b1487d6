"""What an engine counts of its steps, and of the tokens that they emit. `request_recorder` counts the requests."""

import time

from specray.config import SpeculativeConfig
from specray.engine.acceptance_alarm import AcceptanceAlarm
from specray.engine.request import Emitted
from specray.engine.stats import EngineStats
from specray.step import DraftFault, StepResult


class StatsRecorder:
    """Writes to `stats`. Requests by which the server checks itself are not counted there."""

    def __init__(self, stats: EngineStats, speculative: SpeculativeConfig, lacks_cpu_kernels: bool) -> None:
        self._stats = stats
        self._alarm = AcceptanceAlarm(stats)
        stats.set("specray_verification_is_lossy", speculative.is_lossy)
        stats.set("specray_acceptance_is_simulated", speculative.is_simulated)
        stats.set("specray_cpu_kernels_absent", lacks_cpu_kernels)

    def emitted(self, emitted: Emitted, num_kept: int, num_allowed: int, drafter: str) -> None:
        """A request has new tokens, of which its stop conditions kept the first `num_kept`.

        Its step was allowed `num_allowed` drafts for it, those of `drafter`.
        """
        request, stats = emitted.request, self._stats
        before, request.last_token = request.last_token, time.monotonic()
        if before is None:
            request.first_token = request.last_token
        if request.spec.is_probe:
            return
        stats.add("specray_generation_tokens_total", num_kept)
        if before is not None:
            stats.observe("specray_inter_token_latency_seconds", request.last_token - before)
            stats.add("specray_draft_budget_tokens_total", num_allowed)
            result, num_accepted = emitted.result, num_kept - 1
            stats.accepted(result.num_draft_tokens, num_accepted)
            if result.num_draft_tokens > len(result.forced_nodes) and request.has_usual_trees:
                num_forced = sum(node in result.forced_nodes for node in result.accepted_nodes[:num_accepted])
                self._alarm.count_tree(drafter, num_accepted - num_forced, request.has_grammar)
        elif not request.spec.emitted_token_ids:
            stats.observe("specray_time_to_first_token_seconds", request.last_token - request.arrival)

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
