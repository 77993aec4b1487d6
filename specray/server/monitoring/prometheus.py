"""Engine metrics in Prometheus text format, through prometheus-client.

Names, types and help texts come from `specray.metrics.METRICS`. Export through Ray lives in `cluster.engine.metrics`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled
from specray.metrics import Metric as Definition
from specray.server.monitoring.metric_aliases import AliasCollector

REPLICA = "replica"  # label of every series: the Router replica, as in Ray's metrics
Value = float | dict[str, float] | HistogramSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus_text(snapshots: Mapping[str, Snapshot], alias_model: str | None = None) -> bytes:
    """Snapshots by replica in Prometheus text format; for `alias_model` also under vLLM's and SGLang's names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshots))
    if alias_model is not None:
        registry.register(AliasCollector(snapshots, alias_model))
    text: bytes = generate_latest(registry)
    return text


class SnapshotCollector(Collector):
    """Exposes snapshots to prometheus-client."""

    def __init__(self, snapshots: Mapping[str, Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        for definition in METRICS:
            family = _family(definition)
            for replica, snapshot in self._snapshots.items():
                _add(family, definition, replica, snapshot[definition.name])
            yield family


def _family(definition: Definition) -> Metric:
    families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    labels = [REPLICA, definition.label] if definition.label else [REPLICA]
    family: Metric = families[definition.kind](definition.name, definition.help, labels=labels)
    return family


def _add(family: Any, definition: Definition, replica: str, value: Value) -> None:
    if isinstance(value, HistogramSnapshot):
        family.add_metric([replica], buckets=value.cumulative(), sum_value=value.total)
        return
    for label_value, number in labelled(value):
        family.add_metric([replica, label_value] if definition.label else [replica], number)
