"""Engine metrics in Prometheus text format, through prometheus-client.

Names, types and help texts come from `specray.metrics.METRICS`. Export through Ray lives in `cluster.engine.metrics`.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled
from specray.metrics import Metric as Definition
from specray.server.monitoring.metric_aliases import SGLANG, VLLM

REPLICA = "replica"  # label of every series: the Router replica, as in Ray's metrics; "engine" under other names
Value = float | dict[str, float] | HistogramSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_OURS = {definition.name: definition for definition in METRICS}


def prometheus_text(snapshots: Mapping[str, Snapshot], alias_model: str | None = None) -> bytes:
    """Snapshots by replica in Prometheus text format; for `alias_model` also under vLLM's and SGLang's names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshots, alias_model))
    text: bytes = generate_latest(registry)
    return text


class SnapshotCollector(Collector):
    """Exposes snapshots to prometheus-client."""

    def __init__(self, snapshots: Mapping[str, Snapshot], alias_model: str | None) -> None:
        self._snapshots = snapshots
        self._alias_model = alias_model

    def collect(self) -> Iterator[Metric]:
        for name, definition in _OURS.items():
            yield self._family(definition, itemgetter(name), [REPLICA])
        if self._alias_model is None:
            return
        for name, source in (VLLM | SGLANG).items():
            value_in: Callable[[Snapshot], Value]
            if isinstance(source, str):
                definition, value_in = _OURS[source]._replace(name=name), itemgetter(source)
            else:
                text = "Computed since the engine started."
                definition = Definition(name, "counter" if name.endswith("_total") else "gauge", text)
                value_in = source
            yield self._family(definition, value_in, ["model_name", "engine"], self._alias_model)

    def _family(
        self, definition: Definition, value_in: Callable[[Snapshot], Value], labels: list[str], *values: str
    ) -> Metric:
        """`labels` are those of all series: with these `values`, and last the replica."""
        own = [] if definition.label is None else [definition.label]
        family: Any = _FAMILIES[definition.kind](definition.name, definition.help, labels=labels + own)
        for replica, snapshot in self._snapshots.items():
            value, series = value_in(snapshot), [*values, replica]
            if isinstance(value, HistogramSnapshot):
                family.add_metric(series, buckets=value.cumulative(), sum_value=value.total)
                continue
            for label_value, number in labelled(value):
                family.add_metric(series + [label_value] * len(own), number)
        metric: Metric = family
        return metric
