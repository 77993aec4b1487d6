"""The interface of draft budgets, the fixed one, and the times of steps that a budget learns from."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.costs import StepShape
from specray.step import StepPlan, StepResult


class Drafting(NamedTuple):
    """A request that samples in the step to be planned."""

    most: int  # draft tokens that may be verified for it: the drafter's tree, the client's limit, the tokens left
    acceptance: RequestAcceptance
    is_recorded: bool = True  # `record_tree` will be called with its trees
    is_reading: bool = False  # it computes the last part of its prompt in the step


class Shares(NamedTuple):
    """What a step may draft."""

    num_drafts: list[int]  # each request's drafts
    runs_drafter: bool = True  # False: the drafter is not called after the step
    min_scores: list[float] | None = None  # each request's, see DraftLimit; None: scores do not matter


class DraftBudget(Protocol):
    """Chooses the drafts of every step, and learns from the steps. A new drafter gets a new budget."""

    learns: bool  # whether `record_tree` and `record_step` are called

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:
        """Draft tokens for each of the requests that sample in the next step, oldest first.

        `num_reading` more requests compute a part of their prompts that is not the last one.
        """

    def record_tree(
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        """Learn from one verified tree; its nodes are counted from 1, because the root is 0.

        `scores` are those of all its drafts, of which the first `num_drafts` were verified; empty if not known.
        """

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        """Learn from a step of which each request computed one known token and its drafts.

        `target_seconds` are those of forward and verification, `rest_seconds` all others since the step before; None
        if the drafter was called but allowed no drafts, because such steps do not last.
        """


class StaticBudget:
    """Equal shares of `max_step_draft_tokens`; None sets no limit."""

    learns = False

    def __init__(self, max_step_draft_tokens: int | None) -> None:
        self._most = max_step_draft_tokens

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:  # noqa: ARG002
        wanted = [request.most for request in requests]
        return Shares(wanted if self._most is None else equal_shares(wanted, self._most))

    def record_tree(
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        """Nothing depends on it."""

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        """Nothing depends on it."""


def equal_shares(wanted: Sequence[int], most: int) -> list[int]:
    """At most `most` drafts in all: each request as many as it wants, but no more than an equal share of what is left.

    The oldest requests get the remainder of the division.
    """
    shares, left = [0] * len(wanted), most
    by_want = sorted(range(len(wanted)), key=lambda place: (wanted[place], -place))
    for num_before, place in enumerate(by_want):
        shares[place] = min(wanted[place], left // (len(wanted) - num_before))
        left -= shares[place]
    return shares


class StepTimer:
    """Passes the times of steps that only decode to a budget.

    While plans are in flight, a step's time counts from the result before it: what the host does meanwhile is hidden.
    """

    def __init__(self) -> None:
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
        if not only_decodes or kind != before:
            return
        drafts = [row.num_draft_tokens for row in result.rows]
        target = min(seconds, result.times.forward + result.times.verify)  # the next pass may run during verification
        rest = None if plan.runs_drafter and not allowed else seconds - target
        budget.record_step(StepShape(len(drafts), sum(drafts), allowed), target, rest)
