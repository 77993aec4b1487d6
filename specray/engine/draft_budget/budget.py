"""The interface of draft budgets, and the fixed one."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.costs import StepShape
from specray.step import BucketSeconds

DRAFTER_OFF_AFTER = 4  # steps without drafts until the drafter is no longer called
# A step with drafts counts as this many times its measured time, so that plain decoding wins what is within the noise.
DRAFTING_MARGIN = 1.02
PLAIN_STEPS = 4  # without drafts in a row; the time of the first one depends on the drafts of the one before
MAX_PRIORITY = 2  # beyond it, or below its negative, a priority changes no weight


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

    def record_bucket_seconds(self, buckets: Sequence[BucketSeconds]) -> None:
        """Learn what steps in CUDA graphs take."""


class PlainSteps:
    """Chooses a share of the steps, in runs of PLAIN_STEPS, that have no drafts: they measure plain decoding."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._due = 0.0  # steps without drafts that are to come
        self._left = 0  # of those that have begun

    def next_is_plain(self) -> bool:
        """Count one more step; True if it has no drafts."""
        self._due += self._share
        if self._due >= PLAIN_STEPS:
            self._left, self._due = PLAIN_STEPS, self._due - PLAIN_STEPS
        self._left, is_plain = max(0, self._left - 1), self._left > 0
        return is_plain


class StaticBudget:
    """Equal shares of `max_step_draft_tokens`; None sets no limit. `plain_share` of the steps have no drafts."""

    learns = False

    def __init__(self, max_step_draft_tokens: int | None, plain_share: float = 0.0) -> None:
        self._most = max_step_draft_tokens
        self._plain = PlainSteps(plain_share)

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:  # noqa: ARG002
        wanted = [request.most for request in requests]
        if self._plain.next_is_plain():
            return Shares([0] * len(requests))
        weights = [request.weight for request in requests]
        return Shares(wanted if self._most is None else shares_by_weight(wanted, weights, self._most))

    def record_tree(
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        """Nothing depends on it."""

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        """Nothing depends on it."""

    def record_bucket_seconds(self, buckets: Sequence[BucketSeconds]) -> None:
        """Nothing depends on it."""


def shares_by_weight(wanted: Sequence[int], weights: Sequence[float], most: int) -> list[int]:
    """At most `most` drafts in all: each request as many as it wants, but no more than its share of what is left.

    Of equal weights, the oldest requests get the remainder of the division.
    """
    shares, left, weight_left = [0] * len(wanted), most, sum(weights)
    by_want = sorted(range(len(wanted)), key=lambda place: (wanted[place] / weights[place], -place))
    for place in by_want:
        shares[place] = min(wanted[place], int(left * weights[place] / weight_left + 1e-9))
        left, weight_left = left - shares[place], weight_left - weights[place]
    return shares


def draft_weights(requests: Sequence[tuple[str, int]]) -> list[float]:
    """How much the drafts of each request (tenant, priority) count: half as much for each step of its priority.

    The mean of each tenant is 1, so that a priority gains it nothing against others.
    """
    weights = [2.0 ** -max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)) for _, priority in requests]
    if len(set(weights)) < 2:
        return [1.0] * len(weights)
    of_tenant = defaultdict(list)
    for (tenant, _), weight in zip(requests, weights, strict=True):
        of_tenant[tenant].append(weight)
    means = {tenant: fmean(own) for tenant, own in of_tenant.items()}
    return [weight / means[tenant] for (tenant, _), weight in zip(requests, weights, strict=True)]
