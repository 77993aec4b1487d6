"""The interface of draft budgets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.costs import StepShape
from specray.step import BucketSeconds

DRAFTER_OFF_AFTER = 4  # steps without drafts until the drafter is no longer called
# A step with drafts counts as this many times its measured time, so that plain decoding wins what is within the noise.
DRAFTING_MARGIN = 1.02


class Drafting(NamedTuple):
    """A request that samples in the step to be planned."""

    most: int  # draft tokens that may be verified for it: the drafter's tree, the client's limit, the tokens left
    acceptance: RequestAcceptance
    is_recorded: bool = True  # `record_tree` will be called with its trees
    is_reading: bool = False  # it computes the last part of its prompt in the step
    weight: float = 1.0  # of its tokens, see `draft_weights`
    is_compared: bool = False  # a shadow drafts for it as well: both drafters show whole trees, whether they pay or not


class Shares(NamedTuple):
    """What a step may draft."""

    num_drafts: list[int]  # each request's drafts
    runs_drafter: bool = True  # False: the drafter is not called after the step
    min_scores: list[float] | None = None  # each request's, see DraftLimit; None: scores do not matter


class DraftBudget(ABC):
    """Chooses the drafts of every step, and may learn from the steps. A new drafter gets a new budget."""

    learns = True  # whether `record_tree` and `record_step` are called

    @abstractmethod
    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:
        """Draft tokens for each of the requests that sample in the next step, oldest first.

        `num_reading` more requests compute a part of their prompts that is not the last one.
        """

    def record_tree(  # noqa: B027
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        """Learn from one verified tree; its nodes are counted from 1, because the root is 0.

        `scores` are those of all its drafts, of which the first `num_drafts` were verified; empty if not known.
        """

    def record_step(  # noqa: B027
        self, shape: StepShape, target_seconds: float, rest_seconds: float | None
    ) -> None:
        """Learn from a step of which each request computed one known token and its drafts.

        `target_seconds` are those of forward and verification, `rest_seconds` all others since the step before; None
        if the drafter was called but allowed no drafts, because such steps do not last.
        """

    def record_bucket_seconds(self, buckets: Sequence[BucketSeconds]) -> None:  # noqa: B027
        """Learn what steps in CUDA graphs take."""
