"""The engine's counters as Prometheus text, through prometheus-client.

Names, kinds and help come from `specray.metrics.METRICS`. Not here: Ray's own metrics (`cluster.metrics`).
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specray.metrics import METRICS, SECONDS_BUCKETS, HistogramSnapshot, Snapshot
from specray.metrics import Metric as Definition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKET_BOUNDS = [*(f"{bound:g}" for bound in SECONDS_BUCKETS), "+Inf"]


def prometheus_text(snapshot: Snapshot) -> bytes:
    """The snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    text: bytes = generate_latest(registry)
    return text


class SnapshotCollector(Collector):
    """Shows one snapshot to prometheus-client."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for definition in METRICS:
            value = self._snapshot[definition.name]
            if isinstance(value, HistogramSnapshot):
                yield _histogram(definition, value)
            else:
                yield _simple(definition, value)


def _simple(definition: Definition, value: float | dict[str, float]) -> Metric:
    family = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    labels = [definition.label] if definition.label else None
    metric = family(definition.name, definition.help, labels=labels)
    for label_value, number in labelled(value):
        metric.add_metric([label_value] if definition.label else [], number)
    return metric


def _histogram(definition: Definition, value: HistogramSnapshot) -> Metric:
    metric = HistogramMetricFamily(definition.name, definition.help)
    metric.add_metric([], buckets=cumulative(value), sum_value=value.total)
    return metric


def cumulative(value: HistogramSnapshot) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as Prometheus counts."""
    return list(zip(BUCKET_BOUNDS, accumulate(value.buckets), strict=True))


def labelled(value: float | dict[str, float]) -> Iterable[tuple[str, float]]:
    """(label value, number); a metric without a label has the empty one."""
    return value.items() if isinstance(value, dict) else [("", value)]
