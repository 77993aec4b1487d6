"""The log line and the export to Ray's metrics."""

from typing import ClassVar

import pytest

import cluster.engine.metrics
from cluster.engine.metrics import EngineSizes, LogReporter, RayExporter, log_lines
from specray.engine.stats import EngineStats


class FakeGauge:
    """Keeps the last value for each set of tags, as Ray does."""

    made: ClassVar[dict[str, "FakeGauge"]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str] | None) -> None:
        assert description.endswith(".")
        self.tag_keys = tag_keys or ()
        self.values: dict[str, float] = {}
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        self.values["".join(tags.values())] = value


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


SIZES = EngineSizes(num_kv_tokens=1000, has_graphs=True)


def test_log_lines_cover_the_interval_only() -> None:
    [line] = log_lines(EngineStats().snapshot(), busy_stats().snapshot(), 2.0, SIZES)
    assert line == (
        "Decode batch. #running-req: 3, #token: 50, token usage: 0.05, accept len: 2.30, cuda graph: True, "
        "gen throughput (token/s): 23.0, #queue-req: 0"
    )


def test_prompts_have_a_line_of_their_own() -> None:
    before, stats = busy_stats(), busy_stats()
    before.observe("specray_request_queue_time_seconds", 1.0)
    for seconds in (1.0, 0.1, 0.2):
        stats.observe("specray_request_queue_time_seconds", seconds)
    stats.add("specray_prompt_tokens_total", 70)
    stats.add("specray_prefix_cache_hits_total", 30)
    line, _ = log_lines(before.snapshot(), stats.snapshot(), 2.0, SIZES)
    assert line == (
        "Prefill batch. #new-seq: 2, #new-token: 40, #cached-token: 30, token usage: 0.05, #running-req: 3, "
        "#queue-req: 0"
    )


def test_log_lines_mark_simulated_acceptance() -> None:
    stats = busy_stats()
    stats.set("specray_acceptance_is_simulated", 1)
    [line] = log_lines(EngineStats().snapshot(), stats.snapshot(), 2.0, SIZES._replace(has_graphs=False))
    assert line.startswith("SIMULATED ACCEPTANCE, Decode batch. #running-req: 3")
    assert "cuda graph: False" in line


def test_no_log_lines_without_traffic() -> None:
    stats = busy_stats()
    stats.set("specray_num_requests_running", 0)
    assert log_lines(stats.snapshot(), stats.snapshot(), 2.0, SIZES) == []


def test_no_log_lines_for_probes() -> None:
    """The server's own probes make steps without tokens, and one may be running when the line is due."""
    before, stats = busy_stats(), busy_stats()
    before.set("specray_num_requests_running", 0)
    stats.add("specray_steps_total", 5)
    stats.set("specray_num_requests_running", 1)
    assert log_lines(before.snapshot(), stats.snapshot(), 10.0, SIZES) == []


def test_a_long_prefill_has_a_log_line() -> None:
    [line] = log_lines(busy_stats().snapshot(), busy_stats().snapshot(), 10.0, SIZES)
    assert line.startswith("Decode batch. #running-req: 3")


def test_reporter_writes_one_line_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    stats = EngineStats()
    reporter = LogReporter(10.0, SIZES, lambda: now)
    with caplog.at_level("INFO", "ray.serve"):
        for _ in range(25):
            stats.add("specray_generation_tokens_total")
            reporter.report(stats.snapshot())
            now += 1.0
    assert len(caplog.records) == 2


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeGauge]:
    monkeypatch.setattr(cluster.engine.metrics.ray_metrics, "Gauge", FakeGauge)
    FakeGauge.made.clear()
    return FakeGauge.made


def test_snapshots_are_exported_to_ray(gauges: dict[str, FakeGauge]) -> None:
    exporter, stats = RayExporter(), busy_stats()
    exporter.export(stats.snapshot())
    stats.add("specray_generation_tokens_total", 4)
    stats.observe("specray_time_to_first_token_seconds", 100.0)
    exporter.export(stats.snapshot())
    assert gauges["specray_generation_tokens_total"].values == {"": 50}
    assert gauges["specray_num_requests_running"].values == {"": 3}
    assert gauges["specray_drafter_info"].values == {"none": 1}
    buckets = gauges["specray_time_to_first_token_seconds_bucket"].values
    assert (buckets["0.02"], buckets["0.05"], buckets["+Inf"]) == (0, 1, 2)
    assert gauges["specray_time_to_first_token_seconds_count"].values == {"": 2}


def test_zeros_are_exported_so_that_a_rate_includes_the_first_event(gauges: dict[str, FakeGauge]) -> None:
    RayExporter().export(EngineStats().snapshot())
    assert gauges["specray_requests_refused_total"].values == {"": 0}
    assert gauges["specray_request_finished_total"].values == {"stop": 0, "length": 0, "abort": 0, "error": 0}
