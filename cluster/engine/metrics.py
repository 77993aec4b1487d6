"""Snapshots of the engine's counters, sent to Ray's metrics and made into a log line.

Names, kinds and help come from `specray.metrics.METRICS`; nothing is defined here. Not here: counting,
and the Prometheus text of /metrics (`openai.prometheus`).
"""

from collections.abc import Iterator

from ray.serve import metrics as ray_metrics  # its metrics know their replica

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled, number


class RayExporter:
    """Sends snapshots to Ray's metrics, where they are `ray_specray_…` with application, replica and node as labels.

    All are gauges for Ray, which PromQL differences just as well. Its counters take no zero, so that a rare event's
    series would begin at 1 and no rate would see the first; `_total` is put after their names, a histogram's `_bucket`
    included; and they outlive the replica.
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
    """What happened between two snapshots in SGLang's style; None if nothing did."""

    def grown(name: str) -> float:
        return number(now, name) - number(before, name)

    if not grown("specray_steps_total") and not number(now, "specray_num_requests_waiting"):
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


def _ray_families() -> Iterator[tuple[str, str, str | None]]:
    """(name, help, label). Ray's histograms take single observations only, so ours become the parts Prometheus has."""
    for metric in METRICS:
        if metric.kind != "histogram":
            yield metric.name, metric.help, metric.label
            continue
        yield f"{metric.name}_bucket", metric.help, "le"
        yield f"{metric.name}_sum", metric.help, None
        yield f"{metric.name}_count", metric.help, None


def _samples(snapshot: Snapshot) -> Iterator[tuple[str, str, float]]:
    """(family, label value, value) of everything in a snapshot; no label is the empty string."""
    for name, value in snapshot.items():
        if isinstance(value, HistogramSnapshot):
            counts = value.cumulative()
            yield from ((f"{name}_bucket", bound, count) for bound, count in counts)
            yield f"{name}_sum", "", value.total
            yield f"{name}_count", "", counts[-1][1]
        else:
            yield from ((name, label_value, number) for label_value, number in labelled(value))
