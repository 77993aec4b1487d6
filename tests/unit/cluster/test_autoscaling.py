"""Autoscaling: bounds, delays, and robustness against missing or invalid reports."""

from collections import Counter
from itertools import pairwise
from math import ceil, inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.serve.config import AutoscalingContext

from cluster.autoscaling import (
    Decision,
    Sample,
    TokenRatePolicy,
    Trend,
    autoscaling_stats,
    decide,
    desired_replicas,
    serve_autoscaling,
)
from cluster.config import AutoscalingOptions
from specray.engine.stats import EngineStats

OPTIONS = AutoscalingOptions(min_replicas=1, max_replicas=8, target_running=10, down_delay_s=60)
NOW = 1000.0
REPLICA: Any = "a ReplicaID"


def samples(running: float, waiting: float = 0.0, speed: float = 100.0, request_tokens: float = 50.0) -> list[Sample]:
    """Two reports, ten seconds apart, of a replica that was always busy."""
    return [
        Sample(at, waiting, running, speed * (at - 900), at - 900, speed * (at - 900) / request_tokens)
        for at in (NOW - 11, NOW - 1)
    ]


def cluster(*replicas: list[Sample]) -> dict[str, list[Sample]]:
    return {f"r{index}": replica for index, replica in enumerate(replicas)}


@pytest.mark.parametrize(
    ("replicas", "current", "desired"),
    [
        ([samples(10)], 1, 1),  # on target
        ([samples(10.1)], 1, 2),
        ([samples(10), samples(10), samples(10)], 3, 3),
        ([samples(0), samples(1), samples(2)], 3, 1),
        ([samples(0)], 1, 1),  # idle, and min_replicas is 1
        ([samples(10), samples(8)], 2, 2),  # 1.8 plus 10 % is 1.98
        ([samples(6), samples(6), samples(6)], 3, 2),
        ([samples(7), samples(7), samples(5)], 3, 3),  # 1.9 plus 10 % is 2.09
        ([samples(900)], 1, 8),
    ],
)
def test_the_number_follows_running_requests(replicas: list[list[Sample]], current: int, desired: int) -> None:
    assert desired_replicas(cluster(*replicas), current, NOW, OPTIONS) == desired


@pytest.mark.parametrize(
    ("speed", "desired"),
    [
        (1000.0, 2),  # 40 requests of 50 tokens at 1000 tokens/s: 2 s of work, to finish in 5 s
        (200.0, 3),  # 10 s of work, to finish in 5 s
        (1.0, 5),  # at most enough to start the whole queue at once
        (nan, 5),  # speed unknown: only the length of the queue counts
    ],
)
def test_a_queue_counts_by_its_duration_at_the_measured_speed(speed: float, desired: int) -> None:
    replica = samples(10, waiting=40, speed=speed)
    if speed != speed:
        replica = [s._replace(num_tokens=0.0, num_finished=0.0) for s in samples(10, waiting=40)]
    assert desired_replicas(cluster(replica), 1, NOW, OPTIONS) == desired


def test_a_failed_drafter_lowers_the_speed_and_raises_the_number() -> None:
    """Request lengths and step times stay the same, but a step emits a third of the tokens."""
    before, now = samples(10, waiting=30, speed=300)
    healthy, plain = [before, now], [before, now._replace(num_tokens=before.num_tokens + 1000, num_finished=520.0)]
    assert now.num_tokens - before.num_tokens == 3000
    assert desired_replicas(cluster(healthy), 1, NOW, OPTIONS) == 2
    assert desired_replicas(cluster(plain), 1, NOW, OPTIONS) == 4


numbers = st.one_of(st.floats(0, 300), st.sampled_from([nan, inf, -inf, -1.0, 0.0]))
any_sample = st.builds(Sample, st.floats(NOW - 60, NOW + 60), numbers, numbers, numbers, numbers, numbers)
histories = st.dictionaries(st.sampled_from("abcdef"), st.lists(any_sample, max_size=4), max_size=6)


@given(histories, st.integers(0, 9), st.integers(1, 4), st.integers(4, 9))
@settings(max_examples=300)
def test_the_number_is_within_bounds_for_any_reports(
    history: dict[str, list[Sample]], current: int, least: int, most: int
) -> None:
    options = AutoscalingOptions(min_replicas=least, max_replicas=most, target_running=10)
    desired = desired_replicas(history, current, NOW, options)
    assert least <= desired <= most
    assert least <= decide(history, current, NOW, None, options).num_replicas <= most


@given(histories, st.lists(any_sample, max_size=3), st.integers(1, 8))
@settings(max_examples=200)
def test_invalid_and_stale_reports_are_ignored(
    history: dict[str, list[Sample]], more: list[Sample], current: int
) -> None:
    bad = [s._replace(num_running=nan) for s in more] + [s._replace(at=NOW - 20.1) for s in more]
    bad += [s._replace(busy_s=-1.0) for s in more] + [s._replace(num_waiting=inf) for s in more]
    mixed = {name: [*series, *bad] for name, series in history.items()} | {"silent": bad}
    history = history | {"silent": []}
    assert desired_replicas(mixed, current, NOW, OPTIONS) == desired_replicas(history, current, NOW, OPTIONS)


@pytest.mark.parametrize("known", [[samples(0)], [samples(3), samples(3)], []])
@pytest.mark.parametrize("num_silent", [1, 2, 5])
def test_replicas_without_reports_neither_raise_nor_lower_the_number(
    known: list[list[Sample]], num_silent: int
) -> None:
    """The load of reporting replicas is not extrapolated, and a missing report does not mean idle."""
    history = cluster(*known, *([] for _ in range(num_silent)))
    assert num_silent <= desired_replicas(history, len(history), NOW, OPTIONS) <= len(history)


def test_starting_replicas_count_as_idle() -> None:
    """They may take minutes to start, or may never be placed."""
    assert desired_replicas(cluster(samples(30)), 1, NOW, OPTIONS) == 3
    assert desired_replicas(cluster(samples(30)), 3, NOW, OPTIONS) == 3
    assert desired_replicas(cluster(samples(30), [], []), 3, NOW, OPTIONS) == 3  # two run and have not reported yet
    assert desired_replicas(cluster(samples(2)), 3, NOW, OPTIONS) == 1


def test_the_number_is_kept_without_reports() -> None:
    assert desired_replicas({}, 5, NOW, OPTIONS) == 5


def test_reports_from_a_clock_ahead_are_used() -> None:
    ahead = [s._replace(at=s.at + 5) for s in samples(25)]
    assert desired_replicas({"r": ahead}, 1, NOW, OPTIONS) == 3


@pytest.mark.parametrize("least", [1, 2])
def test_an_idle_application_keeps_min_replicas(least: int) -> None:
    options = AutoscalingOptions(min_replicas=least, max_replicas=8)
    assert desired_replicas(cluster(samples(0), samples(0)), 2, NOW, options) == least
    assert desired_replicas(cluster(samples(0.01), samples(0)), 2, NOW, options) == least
    assert desired_replicas({}, 1, NOW, options) == least  # no reports


def play(loads: list[float], options: AutoscalingOptions) -> list[int]:
    """The decision of each second for a total load in requests, shared evenly by replicas that start at once.

    Without a replica, Serve starts one when a request arrives.
    """
    current, trend, decided = max(1, options.min_replicas), None, []
    for second, load in enumerate(loads):
        now = NOW + second
        current = current or (1 if load else 0)
        each = Sample(now, 0.0, load / max(1, current), 1.0, 1.0, 1.0)
        current, trend = decide({f"r{i}": [each] for i in range(current)}, current, now, trend, options)
        decided.append(current)
    return decided


def test_scaling_up_is_fast_and_scaling_down_is_slow() -> None:
    decided = play([5.0] * 10 + [45.0] * 30 + [5.0] * 200, OPTIONS)
    assert decided[:10] == [1] * 10
    assert decided.index(5) == 10 + 5  # up_delay_s
    assert decided[40:].index(1) == 60  # down_delay_s, then in one step
    assert set(decided) == {1, 5}


def test_a_short_rise_or_drop_changes_nothing() -> None:
    assert set(play([5.0] * 10 + [75.0] * 5 + [5.0] * 100, OPTIONS)) == {1}
    lull = play([45.0] * 20 + ([5.0] * 59 + [45.0]) * 5, OPTIONS)
    assert set(lull[10:]) == {5}


def test_scaling_down_stops_at_the_number_sufficient_throughout_the_delay() -> None:
    loads = [75.0] * 20 + [25.0] * 30 + [35.0] * 2 + [5.0] * 28
    assert play(loads, OPTIONS)[-1] == 8
    assert play([*loads, 5.0, 5.0], OPTIONS)[-1] == 4  # 3.5 plus 10 %, after 60 s


@given(
    st.lists(st.tuples(st.integers(0, 480), st.integers(1, 90)), min_size=1, max_size=12),
    st.integers(1, 2),
    st.integers(3, 9),
)
@settings(max_examples=100, deadline=None)
def test_no_load_trace_causes_flapping_or_leaves_the_bounds(
    trace: list[tuple[int, int]], least: int, most: int
) -> None:
    options = AutoscalingOptions(
        min_replicas=least, max_replicas=most, target_running=10, up_delay_s=5, down_delay_s=60
    )
    loads = [load / 4 for load, ticks in trace for _ in range(ticks)]
    decided = play(loads, options)
    changes = [(t, b - a) for t, (a, b) in enumerate(pairwise([least, *decided])) if a != b and a]
    assert all(least <= number <= most for number in decided)
    falls = [t for t, change in changes if change < 0]
    assert all(later - earlier >= 60 for earlier, later in pairwise(falls))
    for t, change in changes:  # falls come after 60 s and rises after 5 s without another change
        assert not [other for other, _ in changes if t - (60 if change < 0 else 5) < other < t]
    for t, change in changes:  # and the number was sufficient, or needed, throughout
        span = loads[t - (60 if change < 0 else 5) : t + 1]
        if change < 0:
            assert decided[t] >= min(most, max(least, ceil(max(span) / 10)))
        else:
            assert decided[t] <= max(least, ceil(min(span) / 10 - 1e-9))


@given(st.floats(0, 70))
@settings(max_examples=30, deadline=None)
def test_a_steady_load_converges_and_stays(load: float) -> None:
    decided = play([load] * 200, OPTIONS)
    assert len(set(decided[10:])) == 1
    assert 10 * decided[-1] >= load
    wobbling = play([load * (1 + 0.04 * (-1) ** (tick // 70)) for tick in range(1400)], OPTIONS)
    assert Counter(a != b for a, b in pairwise(wobbling[10:]))[True] <= 1


def test_a_number_outside_the_bounds_is_corrected_at_once() -> None:
    assert decide(cluster(samples(1)), 12, NOW, None, OPTIONS).num_replicas == 8
    assert decide({}, 0, NOW, None, OPTIONS) == Decision(1, None)


def test_a_trend_restarts_when_its_direction_changes() -> None:
    up = Trend(NOW - 100, 5)
    assert decide(cluster(samples(0), samples(0), samples(0)), 3, NOW, up, OPTIONS) == Decision(3, Trend(NOW, 1))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, ["min_replicas=3", "max_replicas=2", "raise max_replicas"]),
        ({"up_delay_s": 90, "down_delay_s": 60}, ["down_delay_s=60", "up_delay_s=90", "set down_delay_s >= 90"]),
        ({"window_s": 200}, ["down_delay_s=180", "window_s=200", "set down_delay_s >= 200"]),
        ({"max_replica": 2}, ["max_replica"]),
        ({"target_running": 0}, ["target_running"]),
        ({"window_s": 10}, ["window_s"]),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, float], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        AutoscalingOptions.model_validate(options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def busy_stats() -> EngineStats:
    stats = EngineStats()
    stats.set("specray_num_requests_waiting", 4)
    stats.set("specray_num_requests_running", 20)
    stats.add("specray_generation_tokens_total", 700)
    stats.add_labelled("specray_step_seconds_total", "forward", 3.0)
    stats.add_labelled("specray_step_seconds_total", "host", 0.5)
    stats.add_labelled("specray_request_finished_total", "stop", 6)
    stats.add_labelled("specray_request_finished_total", "length", 1)
    return stats


def test_a_report_has_the_fields_of_a_sample() -> None:
    numbers = autoscaling_stats(busy_stats().snapshot())
    assert Sample(NOW, **numbers) == Sample(NOW, 4, 20, 700, 3.5, 7)
    assert all(isinstance(number, int | float) for number in numbers.values())  # otherwise Serve disables the reports


def context(raw_metrics: Any, now: float, num_replicas: int, state: dict[str, Any]) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="Router",
        app_name="default",
        current_num_replicas=num_replicas,
        target_num_replicas=num_replicas,
        running_replicas=[REPLICA] * num_replicas,
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=raw_metrics,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
    )


def test_serve_passes_options_and_state_to_the_policy() -> None:
    config = serve_autoscaling(OPTIONS)
    assert (config.min_replicas, config.max_replicas) == (1, 8)
    assert config.upscale_delay_s == config.downscale_delay_s == 0.0
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)  # pickled, as the controller receives it
    state: dict[str, Any] = {}
    decided = []
    for tick in range(8):
        now = NOW + tick
        numbers = autoscaling_stats(busy_stats().snapshot()) | {"running_requests": 3.0}
        series = {name: {REPLICA: [SimpleNamespace(timestamp=now, value=value)]} for name, value in numbers.items()}
        num_replicas, state = policy(context(series, now, 1, state))
        decided.append(num_replicas)
    assert decided == [1] * 5 + [3] + [1] * 2


def test_times_without_all_metrics_are_skipped() -> None:
    policy = TokenRatePolicy(max_replicas=8, target_running=10, up_delay_s=0)
    numbers = autoscaling_stats(busy_stats().snapshot()) | {"num_running": 70.0}
    series = {name: {REPLICA: [SimpleNamespace(timestamp=NOW, value=value)]} for name, value in numbers.items()}
    assert policy(context(series, NOW, 1, {}))[0] == 8
    series["busy_s"][REPLICA][0].timestamp = NOW - 1
    assert policy(context(series, NOW, 1, {}))[0] == 1
    assert policy(context(None, NOW, 1, {}))[0] == 1
