"""A fixed number of draft tokens a step."""

from collections.abc import Sequence

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting, Shares
from specray.engine.draft_budget.costs import StepShape


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
