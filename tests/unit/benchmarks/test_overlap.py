"""The benchmark of overlapping runs, and a rank that sleeps is what it says."""

import time

import pytest

from benchmarks import overlap
from specray.step import StepPlan


def test_all_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "STEP_MS", (2,))
    found = list(overlap.measure(num_steps=5))
    assert [(case.step_ms, case.batch_size) for case in found] == [(2, 1), (2, 32)]
    assert all(case.one_plan > 1.0 for case in found)


def test_steps_of_a_sleeping_rank_follow_each_other() -> None:
    rank = overlap.SleepingRank(0.05, max_plans=2)
    start = time.perf_counter()
    for step in range(2):
        rank.submit(StepPlan(step, [], [], []))
    assert [rank.collect().step_id for _ in range(2)] == [0, 1]
    assert time.perf_counter() - start >= 0.1
    rank.close()
