"""Exporting the engine's metrics to Ray, and the periodic log line.

Names, types and help texts come from `specray.metrics.METRICS`. `/metrics` lives in
`specray.server.monitoring.prometheus`.
"""

from collections.abc import Iterator

from ray.serve import metrics as ray_metrics  # Serve's metrics have the replica as a label

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled, number


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


def log_line(before: Snapshot, now: Snapshot, seconds: float, num_kv_tokens: int) -> str | None:
    """The log line for the time between two snapshots, in SGLang's style; None if the engine was idle."""

    def grown(name: str) -> float:
        return number(now, name) - number(before, name)

    if not _is_busy(before, now):
        return None
    num_verify_steps = grown("specray_verify_steps_total")
    num_accepted = grown("specray_spec_decode_num_accepted_tokens_total")
    accept_length = 1 + num_accepted / num_verify_steps if num_verify_steps else 0.0
    usage = number(now, "specray_kv_cache_usage_perc")
    simulated = "SIMULATED ACCEPTANCE, " if number(now, "specray_acceptance_is_simulated") else ""
    return (
        f"{simulated}running: {number(now, 'specray_num_requests_running'):.0f}, "
        f"queued: {number(now, 'specray_num_requests_waiting'):.0f}, "
        f"tokens: {usage * num_kv_tokens:.0f}, "
        f"kv usage: {usage:.2f}, "
        f"accept len: {accept_length:.2f}, "
        f"gen throughput (token/s): {grown('specray_generation_tokens_total') / seconds:.1f}"
    )


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
