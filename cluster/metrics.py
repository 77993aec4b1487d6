"""Snapshots of the engine's counters, sent to Ray's metrics and made into a log line.

Names, kinds and help come from `specray.metrics.METRICS`; nothing is defined here. Not here: counting,
and the Prometheus text of /metrics (`openai.prometheus`).
"""

from collections.abc import Iterator
from typing import Any

from ray.util import metrics as ray_metrics

from cluster.openai.prometheus import cumulative, labelled
from specray.metrics import METRICS, HistogramSnapshot, Snapshot


class RayExporter:
    """Sends snapshots to Ray's own metrics: counters by their difference, a histogram as counters per bucket."""

    def __init__(self) -> None:
        self._metrics = {name: _ray_metric(name, kind, help_, label) for name, kind, help_, label in _ray_families()}
        self._sent: dict[tuple[str, str], float] = {}

    def export(self, snapshot: Snapshot) -> None:
        for name, label_value, value in _samples(snapshot):
            metric = self._metrics[name]
            tags = dict.fromkeys(metric.info["tag_keys"], label_value)
            if isinstance(metric, ray_metrics.Gauge):
                metric.set(value, tags)
            elif (more := value - self._sent.get((name, label_value), 0.0)) > 0:
                metric.inc(more, tags)
                self._sent[name, label_value] = value


def log_line(before: Snapshot, now: Snapshot, seconds: float, num_kv_tokens: int) -> str | None:
    """What happened between two snapshots in SGLang's style; None if nothing did."""

    def grown(name: str) -> float:
        return _number(now, name) - _number(before, name)

    if not grown("specray_steps_total") and not _number(now, "specray_num_requests_waiting"):
        return None
    num_verify_steps = grown("specray_verify_steps_total")
    num_accepted = grown("specray_spec_decode_num_accepted_tokens_total")
    accept_length = 1 + num_accepted / num_verify_steps if num_verify_steps else 0.0
    usage = _number(now, "specray_kv_cache_usage_perc")
    return (
        f"running: {_number(now, 'specray_num_requests_running'):.0f}, "
        f"queued: {_number(now, 'specray_num_requests_waiting'):.0f}, "
        f"tokens: {usage * num_kv_tokens:.0f}, "
        f"kv usage: {usage:.2f}, "
        f"accept len: {accept_length:.2f}, "
        f"gen throughput (token/s): {grown('specray_generation_tokens_total') / seconds:.1f}"
    )


def _ray_families() -> Iterator[tuple[str, str, str, str | None]]:
    """Ray's histograms take single observations only, so ours become three counters with Prometheus' names."""
    for name, kind, help_, label in METRICS:
        if kind != "histogram":
            yield name, kind, help_, label
            continue
        yield f"{name}_bucket", "counter", help_, "le"
        yield f"{name}_sum", "counter", help_, None
        yield f"{name}_count", "counter", help_, None


def _ray_metric(name: str, kind: str, help_: str, label: str | None) -> Any:
    family = ray_metrics.Counter if kind == "counter" else ray_metrics.Gauge
    return family(name, description=help_, tag_keys=(label,) if label else ())


def _samples(snapshot: Snapshot) -> Iterator[tuple[str, str, float]]:
    """(family, label value, value) of everything in a snapshot; no label is the empty string."""
    for name, value in snapshot.items():
        if isinstance(value, HistogramSnapshot):
            counts = cumulative(value)
            yield from ((f"{name}_bucket", bound, count) for bound, count in counts)
            yield f"{name}_sum", "", value.total
            yield f"{name}_count", "", counts[-1][1]
        else:
            yield from ((name, label_value, number) for label_value, number in labelled(value))


def _number(snapshot: Snapshot, name: str) -> float:
    value = snapshot[name]
    assert isinstance(value, int | float), name
    return value
