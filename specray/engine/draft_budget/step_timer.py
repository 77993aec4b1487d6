"""The times of steps that draft budgets and metrics learn from."""

import time
from collections.abc import Callable

from specray.engine.draft_budget.budget import DraftBudget
from specray.engine.draft_budget.costs import StepShape
from specray.step import StepPlan, StepResult


class StepTimer:
    """Passes the times of steps that only decode to a budget, and to `record_decode`.

    That is called with the number of requests, the tokens that they generated, the seconds, and whether the step was
    plain: without drafts. Time in the drafter is then left out, because later steps need what it reads meanwhile.

    While plans are in flight, a step's time counts from the result before it: what the host does meanwhile is hidden.
    """

    def __init__(self, record_decode: Callable[[int, int, float, bool], object] = lambda *_: None) -> None:
        self._record_decode = record_decode
        self.seconds = 0.0  # of the last step
        self._since = time.perf_counter()
        self._last: tuple[int, int, bool] | None = None  # of the plan before: requests, most drafts, runs_drafter

    def start(self, now: float, *, is_busy: bool) -> None:
        """The engine begins to wait for a step; `is_busy` if the ranks had its plan already."""
        if not is_busy:
            self._since = now

    def end(self, now: float, plan: StepPlan, result: StepResult, budget: DraftBudget) -> None:
        """The result of `plan` has arrived."""
        self.seconds = seconds = now - self._since
        self._since = now
        allowed = max((row.draft_limit.num_tokens for row in plan.rows), default=0)
        kind, before = (len(plan.rows), allowed, plan.runs_drafter), self._last
        decodes = all(row.num_tokens == 1 for row in plan.rows) and all(row.token_ids for row in result.rows)
        only_decodes = bool(plan.rows) and not plan.new_requests and decodes and not result.draft_faults
        # Drafts of a step are made after the step before, under its limits and with the prompts that it read: both
        # steps have to be alike.
        self._last = kind if only_decodes else None
        if not only_decodes or before is None:
            return
        if (before[0], before[1] > 0) == (len(plan.rows), allowed > 0):
            generated = sum(len(row.token_ids) for row in result.rows)
            waited = 0.0 if allowed else result.times.draft
            self._record_decode(len(plan.rows), generated, seconds - waited, not allowed)
        if kind != before or not budget.learns:
            return
        drafts = [row.num_draft_tokens for row in result.rows]
        target = min(seconds, result.times.forward + result.times.verify)  # the next pass may run during verification
        rest = None if plan.runs_drafter and not allowed else seconds - target
        budget.record_step(StepShape(len(drafts), sum(drafts), allowed), target, rest)
