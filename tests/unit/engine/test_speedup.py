"""The measured speed-up compares steps with drafts to plain steps with as many requests."""

import pytest

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting
from specray.engine.draft_budget.static import PLAIN_STEPS, StaticBudget
from specray.engine.draft_budget.step_timer import StepTimer
from specray.engine.stats import EngineStats
from specray.engine.step_times import DRAFTED, PLAIN, MeasuredSpeedup
from specray.step import DraftLimit, RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes


class Machine:
    """Steps of `num_requests`, each with `num_drafts` of which all are accepted."""

    def __init__(self) -> None:
        self.stats, self.now = EngineStats(), 0.0
        self._timer = StepTimer(MeasuredSpeedup(self.stats).record)

    def step(self, num_requests: int, num_drafts: int, seconds: float, drafting: float = 0.0) -> None:
        rows = [ScheduledRequest(slot, 1, DraftLimit(num_drafts, num_drafts), []) for slot in range(num_requests)]
        results = [RequestResult(slot, [5] * (1 + num_drafts), num_drafts, None, None) for slot in range(num_requests)]
        self.now += seconds
        times = StepTimes(0.0, seconds - drafting, 0.0, drafting)
        self._timer.end(self.now, StepPlan(1, [], [], rows), StepResult(1, results, times), StaticBudget(None))

    @property
    def seconds(self) -> tuple[float, float]:
        return self.stats.values[DRAFTED], self.stats.values[PLAIN]


def test_nothing_is_counted_before_plain_steps_with_as_many_requests() -> None:
    machine = Machine()
    for _ in range(3):
        machine.step(1, 0, 1.0)
        machine.step(8, 3, 4.0)
    assert machine.seconds == (0, 0)


def test_the_counters_have_the_gain_of_each_size() -> None:
    machine = Machine()
    for _ in range(4):
        machine.step(1, 0, 1.25, drafting=0.25)  # the drafter reads for later steps
        machine.step(1, 0, 1.25, drafting=0.25)
    for _ in range(4):
        machine.step(4, 0, 2.0)
    for _ in range(3):
        machine.step(1, 3, 1.6)  # the first one follows another kind of step and is not counted
    assert machine.seconds == pytest.approx((2 * 1.6, 2 * 4 * 1.0))
    for _ in range(3):
        machine.step(4, 3, 4.0)
    assert machine.seconds == pytest.approx((2 * 1.6 + 2 * 4.0, 2 * 4 * 1.0 + 2 * 16 * 0.5))


def test_a_static_budget_takes_its_share_of_plain_steps_in_runs() -> None:
    budget, request = StaticBudget(None, plain_share=1 / 64), Drafting(5, RequestAcceptance())
    plain = [budget.shares([request]).num_drafts == [0] for _ in range(2100)]
    assert sum(plain) == 32
    starts = sum(now and not before for before, now in zip([False, *plain], plain, strict=False))
    assert starts == 32 // PLAIN_STEPS
    assert not any(StaticBudget(None).shares([request]).num_drafts == [0] for _ in range(2000))
