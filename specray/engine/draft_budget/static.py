"""The budget that shares a fixed number of drafts among the requests of a step."""

from collections.abc import Sequence

from specray.engine.draft_budget.budget import DraftBudget, Drafting, Shares

PLAIN_STEPS = 4  # without drafts in a row; the time of the first one depends on the drafts of the one before


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


class StaticBudget(DraftBudget):
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
