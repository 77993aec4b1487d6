"""Costs of steps: what was measured is predicted, and what lies between or beyond is guessed sensibly."""

import json
import platform
import threading
from operator import mul
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.config import EngineConfig
from specray.engine.draft_budget.costs import HALF_LIFE, KNOWN_AFTER, Curve, StepCosts, StepShape, rising
from specray.engine.draft_budget.store import CostStore
from specray.engine.executor import Capacity

NOT_FINITE = [
    '{"target": [[1, 0.1, NaN]], "rest": []}',
    '{"target": [[1, NaN, 1]], "rest": []}{"target": [[1e999, 0.1, 1]], "rest": []}',
]


def shape(num_requests: int, num_drafts: int) -> StepShape:
    return StepShape(num_requests, num_drafts, -(-num_drafts // num_requests))


def learnt(num_requests: int = 1) -> StepCosts:
    """A target of 10 ms and 1 ms a token beyond 4; drafting takes 1 ms, and 0.5 ms a level."""
    costs = StepCosts()
    for _ in range(200):
        for drafts in (0, 2, 5, 9):
            shaped = shape(num_requests, drafts * num_requests)
            target = 0.010 + 0.001 * max(0, num_requests * (1 + drafts) - 4)
            rest = 0.001 * (drafts > 0) + 0.0005 * drafts
            costs.observe(shaped, target, rest)
    return costs


@pytest.mark.parametrize(
    ("drafts", "seconds"),
    [(0, 0.010), (2, 0.012), (5, 0.0155), (9, 0.0215), (7, 0.0185), (14, 0.029)],
)
def test_times_are_predicted_at_between_and_beyond_what_was_measured(drafts: int, seconds: float) -> None:
    predicted = learnt().seconds(shape(1, drafts))
    assert predicted == pytest.approx(seconds, rel=0.03)


def test_one_disturbed_step_changes_little() -> None:
    costs = learnt()
    before = costs.seconds(shape(1, 5))
    costs.observe(shape(1, 5), 3.0, 3.0)
    assert costs.seconds(shape(1, 5)) == pytest.approx(before, rel=0.15)


def test_a_machine_that_became_slower_is_learnt_again() -> None:
    costs = learnt()
    for _ in range(200):
        for drafts in (0, 2, 5, 9):
            costs.observe(shape(1, drafts), 0.1 + 0.01 * drafts, 0.02)
    assert costs.seconds(shape(1, 5)) == pytest.approx(0.17, rel=0.05)


def test_a_slower_machine_is_slower_at_what_is_not_measured_again() -> None:
    costs = learnt()
    for _ in range(50):
        costs.observe(shape(1, 2), 0.024, 0.004)  # twice as long as before
    assert costs.seconds(shape(1, 9)) == pytest.approx(2 * 0.0215, rel=0.1)


@pytest.mark.parametrize("usual", [5, 0])
def test_what_is_rarely_measured_stays_comparable_on_a_busy_machine(usual: int) -> None:
    """Every twentieth step takes three times as long. Of 200 steps, 4 try out another number of drafts."""
    costs, random = StepCosts(), Random(0)
    for step in range(10_000):
        is_trial = step % 200 < 4
        slowdown = 3.0 if random.random() < 0.05 else random.uniform(0.8, 1.2)
        if (usual > 0) is is_trial:
            costs.observe(shape(1, 0), 0.013 * slowdown, 0.0)
        else:
            costs.observe(shape(1, 5), 0.016 * slowdown, 0.005 * slowdown)
    assert costs.seconds(shape(1, 5)) / costs.seconds(shape(1, 0)) == pytest.approx(21 / 13, rel=0.1)
    assert costs.target(1) / costs.to_json()["target"][0][1] == pytest.approx(1, rel=0.5)  # the pace stays near 1


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 32)), max_size=8))
def test_fitted_times_rise_and_keep_their_weighted_mean(values: list[tuple[float, int]]) -> None:
    fitted, weights = rising(values), [weight for _, weight in values]
    assert fitted == sorted(fitted)
    assert sum(map(mul, fitted, weights)) == pytest.approx(sum(seconds * weight for seconds, weight in values))
    if [seconds for seconds, _ in values] == sorted(seconds for seconds, _ in values):
        assert fitted == [seconds for seconds, _ in values]


def test_nothing_is_known_at_the_start() -> None:
    assert StepCosts().seconds(shape(1, 0)) == StepCosts().seconds(shape(8, 40)) > 0


def test_a_restarted_server_knows_its_costs(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs" / "of.json")
    store.save(learnt())
    store.wait()
    assert store.load().seconds(shape(1, 7)) == learnt().seconds(shape(1, 7))


def test_an_average_that_was_not_measured_for_long_soon_follows_new_measurements() -> None:
    def after(num_others: int) -> float:
        costs = StepCosts()
        for _ in range(100):
            costs.observe(StepShape(1, 3, 3), 1.0, 0.6)
            costs.observe(StepShape(1, 4, 4), 1.0, 0.6)
        for _ in range(num_others):
            costs.observe(StepShape(1, 4, 4), 1.0, 0.6)
        for _ in range(8):
            costs.observe(StepShape(1, 3, 3), 1.0, 0.4)
        return float(costs.rest(1, np.array([3.0]))[0])

    assert after(2000) < 0.5 < after(0)


def test_steps_without_the_drafter_stay_known_though_their_average_fades() -> None:
    """Trials would otherwise stop the drafter each time, and it would miss tokens."""
    costs = StepCosts()
    for _ in range(KNOWN_AFTER):
        costs.observe(StepShape(1, 0, 0), 1.0, 0.1)
    for _ in range(5000):
        costs.observe(StepShape(1, 4, 4), 1.0, 0.6)
    costs.observe(StepShape(1, 0, 0), 1.0, 0.1)
    assert costs.knows_rest_without_drafts(1)


def test_costs_are_kept_by_hardware() -> None:
    """A host name says nothing about it: containers get a new one each time, and runners share one."""
    config, capacity = EngineConfig(), Capacity(40, 6, 100, 50, [1], hardware="2 threads; a")
    first = CostStore.of(config, capacity)
    assert CostStore.of(config, capacity._replace(hardware="2 threads; b")).path != first.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another")
        assert CostStore.of(config, capacity).path == first.path


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"target": [[1]], "rest": {}}', '{"target": 3, "rest": null}', *NOT_FINITE]
)
def test_a_damaged_file_is_named_and_ignored(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CostStore(tmp_path / "costs.json")
    store.path.write_text(text)
    assert store.load().to_json() == json.loads(json.dumps(StepCosts().to_json()))
    [record] = caplog.records
    assert f"{store.path} cannot be read" in record.message


def test_averages_that_are_too_old_to_count_are_still_fitted() -> None:
    """Their weights became 0 after half a million steps, and the mean of two of them ended the engine."""
    curve = Curve([(1, 0.3, 1.0), (2, 0.2, 1.0)])
    curve._num_observed = 2000 * HALF_LIFE
    assert curve.at(2) == pytest.approx(0.25)


def test_a_first_start_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CostStore(tmp_path / "costs.json").load()
    assert not caplog.records


def test_the_step_loop_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_written = threading.Event()
    write = Path.write_text

    def slow(path: Path, *arguments: Any, **options: Any) -> int:
        assert is_written.wait(10)
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", slow)
    store = CostStore(tmp_path / "of.json")
    store.save(learnt())
    store.save(StepCosts())  # left out: the write before goes on
    assert not store.path.exists()
    is_written.set()
    store.wait()
    assert store.load().seconds(shape(1, 7)) == learnt().seconds(shape(1, 7))


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a container whose file system is read-only."""
    (tmp_path / "costs").write_text("not a folder")
    store = CostStore(tmp_path / "costs" / "of.json")
    for _ in range(3):
        store.save(learnt())
        store.wait()
    assert [record.message.count("not kept for the next start") for record in caplog.records] == [1]


def test_a_step_whose_rest_is_not_typical_still_shows_the_targets_time() -> None:
    costs = StepCosts()
    costs.observe(StepShape(2, 0, 0), 0.010, None)
    assert costs.target(2) == pytest.approx(0.010)
    assert not costs.knows_rest_without_drafts(2)
    for _ in range(KNOWN_AFTER):
        assert not costs.knows_rest_without_drafts(2)
        costs.observe(StepShape(2, 0, 0), 0.010, 0.001)
    assert costs.knows_rest_without_drafts(2)


def test_a_disturbed_first_step_is_forgotten_with_the_second() -> None:
    costs = StepCosts()
    costs.observe(shape(1, 0), 0.5, 0.5)
    costs.observe(shape(1, 0), 0.010, 0.001)
    assert costs.target(1) < 0.015


def test_stored_costs_do_not_depend_on_the_pace_of_the_moment() -> None:
    """The next start begins with a pace of 1, and moves what it measures first."""
    costs = learnt()
    for _ in range(50):
        costs.observe(shape(1, 2), 0.024, 0.004)  # twice as long as before
    assert StepCosts.from_json(costs.to_json()).seconds(shape(1, 9)) == pytest.approx(costs.seconds(shape(1, 9)))


def times_of_a_busy_minute() -> StepCosts:
    """Steps of few drafts were measured while other programs used the cores, and those of seven drafts again since."""
    costs = StepCosts()
    for _ in range(64):
        for drafts in (0, 2, 4, 5, 6):
            costs.observe(StepShape(1, drafts, drafts), 0.007 if drafts == 0 else 0.015 + 0.001 * drafts, 0.001)
    for _ in range(4000):
        costs.observe(StepShape(1, 7, 7), 0.0075, 0.001)
    return costs


def test_times_of_a_busy_minute_do_not_outweigh_those_measured_since() -> None:
    """More work never takes less time, so what was measured for less work long ago was disturbed."""
    costs = times_of_a_busy_minute()
    assert costs.target(8) == pytest.approx(0.0075, rel=0.1)


def test_a_restart_does_not_make_old_times_new() -> None:
    costs = StepCosts.from_json(json.loads(json.dumps(times_of_a_busy_minute().to_json())))
    assert costs.target(8) == pytest.approx(0.0075, rel=0.1)
