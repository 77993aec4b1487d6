"""Times of steps as a budget learns them."""

from collections.abc import Sequence

import pytest

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting, Shares
from specray.engine.draft_budget.costs import StepShape
from specray.engine.draft_budget.step_timer import StepTimer
from specray.step import DraftLimit, RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes


class Recorded:
    """A DraftBudget that keeps what it is told."""

    learns = True

    def __init__(self) -> None:
        self.steps: list[tuple[StepShape, float, float | None]] = []

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:
        raise NotImplementedError

    def record_tree(
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        raise NotImplementedError

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        self.steps.append((shape, target_seconds, rest_seconds))


def plan(num_drafts: int) -> StepPlan:
    return StepPlan(1, [], [], [ScheduledRequest(0, 1, DraftLimit(num_drafts, num_drafts), [])], num_drafts > 0)


def result(num_drafts: int, forward: float, verify: float) -> StepResult:
    return StepResult(1, [RequestResult(0, [5], num_drafts, None, None)], StepTimes(0.0, forward, verify, 0.0))


def test_a_step_has_the_targets_part_and_the_rest() -> None:
    timer, budget = StepTimer(), Recorded()
    timer.start(10.0, is_busy=False)
    timer.end(12.0, plan(3), result(3, 0.5, 0.25), budget)
    assert budget.steps == []  # the step before, whose limits made its drafts, was another one
    timer.start(12.5, is_busy=True)
    timer.end(14.0, plan(3), result(2, 0.5, 0.25), budget)
    assert budget.steps == [(StepShape(1, 2, 3), 0.75, 1.25)]


def test_the_first_step_after_a_prompt_is_not_timed() -> None:
    """Its drafts were made by a pass that also read the prompt."""
    timer, budget = StepTimer(), Recorded()
    prompt = StepPlan(1, [], [], [ScheduledRequest(0, 400, DraftLimit(3, 3), [])], runs_drafter=True)
    timer.end(10.0, prompt, result(0, 0.5, 0.25), budget)
    for end in (11.0, 12.0):
        timer.end(end, plan(3), result(3, 0.5, 0.25), budget)
    assert len(budget.steps) == 1


def test_steps_without_the_drafters_answer_are_not_timed() -> None:
    timer, budget = StepTimer(), Recorded()
    for end in (10.0, 11.0, 12.0):
        timer.end(end, plan(3), result(0, 0.5, 0.25)._replace(draft_faults=["late"]), budget)
    assert budget.steps == []


def test_the_targets_part_is_never_longer_than_the_step() -> None:
    """While one step is verified, the pass of the next one may run."""
    timer, budget = StepTimer(), Recorded()
    for end in (10.0, 11.0):
        timer.end(end, plan(0), result(0, 0.9, 0.3), budget)
    [(shape, target, rest)] = budget.steps
    assert (shape, target, rest) == (StepShape(1, 0, 0), pytest.approx(1.0), 0.0)
