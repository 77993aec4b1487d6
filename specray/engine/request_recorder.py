"""What an engine counts of its requests: one method for each event in the life of one, and the gauges of all."""

import time
from collections.abc import Sequence

from specray.engine.request import Request
from specray.engine.scheduler import Scheduler
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason


class RequestRecorder:
    """Writes to `stats`. Requests by which the server checks itself are not counted there."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def queued(self, request: Request) -> None:
        if not request.spec.is_probe:
            self._stats.add("specray_prompt_tokens_total", request.num_prompt_tokens)
            self._stats.add("specray_suspect_requests_total", request.is_suspect)

    def started(self, started: Sequence[Request]) -> None:
        """A step was planned, in which these requests have their first tokens computed."""
        for request in started:
            if request.num_preemptions == 0:
                request.started = time.monotonic()
                if not request.spec.is_probe:
                    self._stats.observe("specray_request_queue_time_seconds", request.started - request.arrival)
                    self._stats.add("specray_prefix_cache_queries_total", request.num_prompt_tokens)
                    self._stats.add("specray_prefix_cache_hits_total", request.num_cached_tokens)

    def finished(self, request: Request, reason: FinishReason) -> None:
        if request.spec.is_probe:
            return
        stats, now = self._stats, time.monotonic()
        stats.add_labelled("specray_request_finished_total", reason.value)
        stats.observe("specray_e2e_request_latency_seconds", now - request.arrival)
        stats.observe("specray_request_prompt_tokens", request.num_prompt_tokens)
        stats.observe("specray_request_generation_tokens", request.num_output_tokens)
        if request.first_token is not None and request.num_output_tokens > 1:
            gap = (now - request.first_token) / (request.num_output_tokens - 1)
            stats.observe("specray_time_per_output_token_seconds", gap)

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
