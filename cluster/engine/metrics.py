"""Exporting the engine's metrics to Ray, and what is read off them over time: Retry-After, accept length, log line.

Names, types and help texts come from `specray.metrics.METRICS`. `/metrics` lives in
`specray.server.monitoring.prometheus`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from math import ceil
from typing import NamedTuple

from ray.serve import metrics as ray_metrics  # Serve's metrics have the replica as a label

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled, number

logger = logging.getLogger("ray.serve")
NUM_ACCEPTED = "specray_spec_decode_num_accepted_tokens_total"
MAX_S = 60  # of Retry-After


class RayExporter:
    """Exports snapshots as Ray metrics named `ray_specray_...`, with application, replica and node as labels.

    All of them are gauges in Ray, because PromQL's `rate` works on gauges too and Ray's counters have three flaws. They
    cannot be exported as zero, so the series of a rare event would begin at 1 and `rate` would miss the first event.
    Ray appends `_total` to their names, even after a histogram's `_bucket`. Ray exports them after the replica ended.
    """

    def __init__(self) -> None:
        self._gauges = {
            name: (ray_metrics.Gauge(name, description=help_, tag_keys=(label,) if label else None), label)
            for name, help_, label in _ray_families()
        }

    def export(self, snapshot: Snapshot) -> None:
        for name, label_value, value in _samples(snapshot):
            gauge, label = self._gauges[name]
            gauge.set(value, {label: label_value} if label else {})


class EngineSizes(NamedTuple):
    """What log lines say of an engine that its counters do not."""

    num_kv_tokens: int
    has_graphs: bool  # see Capacity


def log_lines(before: Snapshot, now: Snapshot, seconds: float, sizes: EngineSizes) -> list[str]:
    """SGLang's lines of prompts and of decoding for the time between two snapshots; none if the engine was idle."""

    def grown(name: str) -> float:
        return number(now, name) - number(before, name)

    if not _is_busy(before, now):
        return []
    usage = number(now, "specray_kv_cache_usage_perc")
    running = f"#running-req: {number(now, 'specray_num_requests_running'):.0f}"
    queued = f"#queue-req: {number(now, 'specray_num_requests_waiting'):.0f}"
    simulated = "SIMULATED ACCEPTANCE, " if number(now, "specray_acceptance_is_simulated") else ""
    lines = []
    if num_prompt := grown("specray_prompt_tokens_total"):
        num_cached = grown("specray_prefix_cache_hits_total")
        lines.append(
            f"Prefill batch. #new-seq: {_observations(now, before, 'specray_request_queue_time_seconds')}, "
            f"#new-token: {num_prompt - num_cached:.0f}, #cached-token: {num_cached:.0f}, token usage: {usage:.2f}, "
            f"{running}, {queued}"
        )
    num_verify_steps = grown("specray_verify_steps_total")
    accept_length = 1 + grown(NUM_ACCEPTED) / num_verify_steps if num_verify_steps else 0.0
    lines.append(
        f"{simulated}Decode batch. {running}, #token: {usage * sizes.num_kv_tokens:.0f}, token usage: {usage:.2f}, "
        f"accept len: {accept_length:.2f}, cuda graph: {sizes.has_graphs}, "
        f"gen throughput (token/s): {grown('specray_generation_tokens_total') / seconds:.1f}, {queued}"
    )
    return lines


def _observations(now: Snapshot, before: Snapshot, name: str) -> int:
    """Observations of a histogram between two snapshots."""
    new, old = now[name], before[name]
    assert isinstance(new, HistogramSnapshot)
    assert isinstance(old, HistogramSnapshot)
    return sum(new.buckets) - sum(old.buckets)


def _is_busy(before: Snapshot, now: Snapshot) -> bool:
    """Whether there were requests. The server's own probes, a step every few seconds, are none."""
    is_running = all(number(snapshot, "specray_num_requests_running") for snapshot in (before, now))
    counters = ("specray_prompt_tokens_total", "specray_generation_tokens_total")
    has_progress = any(number(now, name) > number(before, name) for name in counters)
    return has_progress or is_running or number(now, "specray_num_requests_waiting") > 0


def _ray_families() -> Iterator[tuple[str, str, str | None]]:
    """(name, help, label). Histograms are split, because Ray's histograms accept only single observations."""
    for metric in METRICS:
        if metric.kind != "histogram":
            yield metric.name, metric.help, metric.label
            continue
        yield f"{metric.name}_bucket", metric.help, "le"
        yield f"{metric.name}_sum", metric.help, None
        yield f"{metric.name}_count", metric.help, None


def _samples(snapshot: Snapshot) -> Iterator[tuple[str, str, float]]:
    """(name, label value, value) of everything in a snapshot. The label value is empty without a label."""
    for name, value in snapshot.items():
        if isinstance(value, HistogramSnapshot):
            counts = value.cumulative()
            yield from ((f"{name}_bucket", bound, count) for bound, count in counts)
            yield f"{name}_sum", "", value.total
            yield f"{name}_count", "", counts[-1][1]
        else:
            yield from ((name, label_value, number) for label_value, number in labelled(value))


class _Count(NamedTuple):
    at: float
    num_finished: float


class Backoff:
    """The Retry-After of a full queue: the time until the requests now waiting are expected to have started.

    Measures the rate of finished requests over the last `size` snapshots.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: deque[_Count] = deque(maxlen=size)

    def record(self, snapshot: Snapshot) -> None:
        by_reason = snapshot["specray_request_finished_total"]
        assert isinstance(by_reason, dict)
        self._counts.append(_Count(self._clock(), sum(by_reason.values())))

    def retry_after_s(self, snapshot: Snapshot) -> int:
        """Whole seconds from 1 to MAX_S. If no request finished in the measured time, that time."""
        if not self._counts:
            return 1
        first, last = self._counts[0], self._counts[-1]
        seconds, num_finished = self._clock() - first.at, last.num_finished - first.num_finished
        num_waiting = number(snapshot, "specray_num_requests_waiting")
        return min(MAX_S, max(1, ceil(seconds * num_waiting / num_finished if num_finished else seconds)))


class AcceptanceWindow:
    """Acceptance length over the last `size` snapshots."""

    def __init__(self, size: int) -> None:
        self._counts: deque[tuple[float, float]] = deque(maxlen=size + 1)  # verify steps, accepted tokens

    def record(self, snapshot: Snapshot) -> float | None:
        """Tokens per verify step, bonus token included; None without verify steps."""
        now = number(snapshot, "specray_verify_steps_total"), number(snapshot, NUM_ACCEPTED)
        self._counts.append(now)
        steps, accepted = (new - old for new, old in zip(now, self._counts[0], strict=True))
        return 1 + accepted / steps if steps else None


class LogReporter:
    """Writes log lines once per interval, unless the engine was idle."""

    def __init__(self, interval_s: float, sizes: EngineSizes, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._sizes = sizes
        self._clock = clock
        self._last: tuple[float, Snapshot] | None = None

    def report(self, snapshot: Snapshot) -> None:
        """Log the change since the last lines if the interval has passed. The first call only starts the interval."""
        now = self._clock()
        if self._last is None:
            self._last = now, snapshot
        since, before = self._last
        if now - since < self._interval_s:
            return
        for line in log_lines(before, snapshot, now - since, self._sizes):
            logger.info(line)
        self._last = now, snapshot
