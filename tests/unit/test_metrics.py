"""Metrics have unique names and correct values."""

import json

import pytest

from specray.engine.stats import MAX_POSITIONS, EngineStats
from specray.metrics import METRICS, SECONDS_BUCKETS


def test_names_are_unique_and_follow_the_conventions_of_their_type() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("specray_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_a_snapshot_has_every_metric_and_does_not_change() -> None:
    stats = EngineStats()
    before = stats.snapshot()
    assert set(before) == {metric.name for metric in METRICS}
    copy = json.dumps(before)
    stats.add("specray_steps_total")
    stats.add_labelled("specray_request_finished_total", "stop")
    stats.observe("specray_time_to_first_token_seconds", 0.2)
    assert json.dumps(before) == copy


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        EngineStats().add("specray_typo_total")


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.005, 0), (0.006, 1), (300.0, 13), (301.0, 14)])
def test_an_observation_is_counted_in_the_first_bucket_that_contains_it(seconds: float, bucket: int) -> None:
    stats = EngineStats()
    stats.observe("specray_e2e_request_latency_seconds", seconds)
    histogram = stats.snapshot()["specray_e2e_request_latency_seconds"]
    assert histogram.buckets == [int(i == bucket) for i in range(len(SECONDS_BUCKETS) + 1)]
    assert histogram.total == seconds


def test_accepted_drafts_are_counted_by_depth() -> None:
    stats = EngineStats()
    stats.accepted(num_draft_tokens=5, num_accepted=2)
    stats.accepted(num_draft_tokens=5, num_accepted=0)
    stats.accepted(num_draft_tokens=0, num_accepted=0)  # a root without drafts counts as a verify step only
    values = stats.snapshot()
    assert values["specray_verify_steps_total"] == 3
    assert values["specray_spec_decode_num_drafts_total"] == 2
    assert values["specray_spec_decode_num_draft_tokens_total"] == 10
    assert values["specray_spec_decode_num_accepted_tokens_total"] == 2
    assert values["specray_spec_decode_num_accepted_tokens_per_pos_total"] == {"0": 1, "1": 1}


def test_the_drafter_is_a_label() -> None:
    assert EngineStats("EAGLE3").snapshot()["specray_drafter_info"] == {"EAGLE3": 1}
    assert EngineStats().snapshot()["specray_drafter_info"] == {"none": 1}
    stats = EngineStats("EAGLE3")
    stats.name_drafter(None)
    stats.name_drafter("NGRAM")
    assert stats.snapshot()["specray_drafter_info"] == {"EAGLE3": 0, "none": 0, "NGRAM": 1}


def test_the_number_of_positions_is_bounded() -> None:
    stats = EngineStats()
    stats.accepted(num_draft_tokens=1000, num_accepted=1000)
    positions = stats.snapshot()["specray_spec_decode_num_accepted_tokens_per_pos_total"]
    assert len(positions) == MAX_POSITIONS
