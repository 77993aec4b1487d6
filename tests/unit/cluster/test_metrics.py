"""The log line, and what Ray's metrics are told: differences, never the same count twice."""

from typing import Any

import pytest

import cluster.metrics
from cluster.metrics import RayExporter, log_line
from cluster.router import LogReporter
from specray.metrics import EngineStats, Snapshot


class FakeRayMetric:
    """Adds up what it is told, as Ray would."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:  # noqa: ARG002
        self.info = {"tag_keys": tag_keys}
        self.totals: dict[tuple[str, ...], float] = {}

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.totals[tuple(tags.values())] = self.totals.get(tuple(tags.values()), 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.totals[tuple(tags.values())] = value


class FakeGauge(FakeRayMetric):
    pass


def busy_stats() -> EngineStats:
    stats = EngineStats()
    stats.add("specray_steps_total", 10)
    stats.add("specray_generation_tokens_total", 46)
    stats.add("specray_verify_steps_total", 20)
    stats.add("specray_spec_decode_num_accepted_tokens_total", 26)
    stats.add_labelled("specray_request_finished_total", "stop", 2)
    stats.set("specray_num_requests_running", 3)
    stats.set("specray_kv_cache_usage_perc", 0.05)
    stats.observe("specray_time_to_first_token_seconds", 0.03)
    return stats


def test_log_line_is_of_the_interval() -> None:
    line = log_line(EngineStats().snapshot(), busy_stats().snapshot(), 2.0, num_kv_tokens=1000)
    assert line == "running: 3, queued: 0, tokens: 50, kv usage: 0.05, accept len: 2.30, gen throughput (token/s): 23.0"


def test_no_log_line_without_traffic() -> None:
    stats = busy_stats()
    assert log_line(stats.snapshot(), stats.snapshot(), 2.0, num_kv_tokens=1000) is None


def test_reporter_writes_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    stats = EngineStats()
    reporter = LogReporter(10.0, 1000, lambda: now)
    with caplog.at_level("INFO", "ray.serve"):
        for _ in range(25):
            stats.add("specray_steps_total")
            reporter.report(stats.snapshot())
            now += 1.0
    assert len(caplog.records) == 2


def test_ray_gets_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def maker(kind: type[FakeRayMetric]) -> Any:
        class Made(kind):  # type: ignore[valid-type, misc]
            def __init__(self, name: str, **options: Any) -> None:
                super().__init__(name, **options)
                made[name] = self

        return Made

    monkeypatch.setattr(cluster.metrics.ray_metrics, "Counter", maker(FakeRayMetric))
    monkeypatch.setattr(cluster.metrics.ray_metrics, "Gauge", maker(FakeGauge))
    exporter, stats = RayExporter(), busy_stats()
    snapshots: list[Snapshot] = [stats.snapshot(), stats.snapshot()]
    stats.add("specray_generation_tokens_total", 4)
    stats.observe("specray_time_to_first_token_seconds", 100.0)
    for snapshot in [*snapshots, stats.snapshot()]:
        exporter.export(snapshot)
    assert made["specray_generation_tokens_total"].totals == {(): 50}
    assert made["specray_request_finished_total"].totals == {("stop",): 2}
    assert made["specray_num_requests_running"].totals == {(): 3}
    buckets = made["specray_time_to_first_token_seconds_bucket"].totals
    assert (buckets.get(("0.02",), 0), buckets[("0.05",)], buckets[("+Inf",)]) == (0, 1, 2)
    assert made["specray_time_to_first_token_seconds_count"].totals == {(): 2}
