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
    """At most `most` drafts in all, in equal shares; the oldest requests get the remainder of the division.

    Requests that want none have no share.
    """
    drafting = [place for place, count in enumerate(wanted) if count]
    share, num_more = divmod(most, max(1, len(drafting)))
    shares = [0] * len(wanted)
    for number, place in enumerate(drafting):
        shares[place] = min(wanted[place], share + (number < num_more))
    return shares
