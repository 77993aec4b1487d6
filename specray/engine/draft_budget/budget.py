"""The interface of draft budgets."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.costs import StepShape


class Drafting(NamedTuple):
    """A request that samples in the step to be planned."""

    most: int  # draft tokens that may be verified for it: the drafter's tree, the client's limit, the tokens left
    acceptance: RequestAcceptance
    teaches: bool = True  # `record_tree` will be called with its trees
    is_reading: bool = False  # it computes the last part of its prompt in the step


class Shares(NamedTuple):
    """What a step may draft."""

    num_drafts: list[int]  # for each request
    runs_drafter: bool = True  # False: the drafter is not called after the step
    min_scores: list[float] | None = None  # for each request, see DraftLimit; None: scores do not matter


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
