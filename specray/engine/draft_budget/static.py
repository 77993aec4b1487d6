"""A fixed number of draft tokens a step."""

from collections.abc import Sequence

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting, Shares
from specray.engine.draft_budget.costs import StepShape


class StaticBudget:
    """Equal shares of `max_step_draft_tokens`; None sets no limit."""

    def __init__(self, max_step_draft_tokens: int | None) -> None:
        self._most = max_step_draft_tokens

    def shares(self, requests: Sequence[Drafting]) -> Shares:
        """The oldest requests get the remainder of the division."""
        if self._most is None:
            return Shares([request.most for request in requests])
        share, num_more = divmod(self._most, max(1, len(requests)))
        return Shares([min(request.most, share + (place < num_more)) for place, request in enumerate(requests)])

    def count(self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int]) -> None:
        """Nothing depends on it."""

    def time(self, shape: StepShape, target_seconds: float, rest_seconds: float) -> None:
        """Nothing depends on it."""
