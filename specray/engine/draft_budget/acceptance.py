"""The expected gain of drafts: how often the target accepts the nodes of a tree.

Drafters put the most likely nodes first, so the first n nodes are their best tree of n nodes, and node k is accepted
less often than node k - 1. The rate of each place is measured over all requests. A request's own acceptance scales
them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNKNOWN_FIRST, UNKNOWN_RATIO = 0.6, 0.8  # assumed until measured: of the first node, and of a node to the one before
LEARNING_RATE = 1 / 256  # of a tree, once more than this many were measured
MEMORY_TREES = 64  # of a request's own acceptance
MEMORY_WITHOUT_DRAFTS = 256  # steps without drafts that it outlasts: then the request is tried again
SURE_AFTER, SURE = 8, 0.9  # after so many drafts without a rejected one, a draft is accepted with this chance
MAX_UNREAD_TOKENS = 16  # a draft model that missed more of a request drafts badly for the rest of it
PRIOR_TOKENS = 4.0  # accepted tokens at the average rate that a request starts with
PRIOR_TOKENS_TOGETHER = 16.0  # the same of all requests of a step, whose drafts are turned on and off together


@dataclass(slots=True)
class RequestAcceptance:
    """Accepted tokens of one request, and how many the average rates predicted; older trees count less."""

    accepted: float = 0.0
    expected: float = 0.0
    drafter: str = ""  # the one of several drafters that the request has: their averages differ
    num_unread_tokens: int = 0  # computed in steps after which the drafter was not called
    num_in_row: int = 0  # drafts accepted since the last rejected one
    num_last: int = 0  # drafts of the last tree that had any
    num_trees: int = 0  # whose scores are known

    def add(self, accepted: int, expected: float) -> None:
        """Count a tree."""
        keep = 1 - 1 / MEMORY_TREES
        self.accepted, self.expected = self.accepted * keep + accepted, self.expected * keep + expected

    def fade(self) -> None:
        """Count a step without drafts, which shows nothing, and makes what is known older."""
        keep = 1 - 1 / MEMORY_WITHOUT_DRAFTS
        self.accepted, self.expected = self.accepted * keep, self.expected * keep
        self.num_in_row = max(0, self.num_in_row - 1)  # may have been luck

    @property
    def is_read(self) -> bool:
        """Whether a draft model has read enough of this request to draft for it."""
        return self.num_unread_tokens <= MAX_UNREAD_TOKENS

    @property
    def factor(self) -> float:
        """This request's acceptance relative to the average."""
        return (self.accepted + PRIOR_TOKENS) / (self.expected + PRIOR_TOKENS)

    @property
    def repeats(self) -> bool:
        """Whether this request accepts whatever is drafted: its text repeats an earlier one, say."""
        return self.num_in_row >= SURE_AFTER

    def count_in_row(self, num_drafts: int, num_accepted: int) -> None:
        """Count a tree with drafts for `repeats`."""
        self.num_in_row = self.num_in_row + num_drafts if num_accepted == num_drafts else 0
        self.num_last = num_drafts

    def gains(self, usual: Sequence[float]) -> list[float]:
        """Expected accepted tokens of each node, never rising, from the `usual` ones.

        A request that repeats accepts far more than any factor of the usual gains of deep nodes, so it is expected to
        accept twice as many drafts as the last time.
        """
        factor = self.factor
        gains = [min(1.0, gain * factor) for gain in usual]
        sure = 2 * self.num_last if self.repeats else 0
        return [max(SURE, gain) for gain in gains[:sure]] + gains[sure:]


def factor_together(requests: Iterable[RequestAcceptance]) -> float:
    """The acceptance of several requests relative to the average."""
    accepted = expected = PRIOR_TOKENS_TOGETHER
    for request in requests:
        accepted, expected = accepted + request.accepted, expected + request.expected
    return accepted / expected


class NodeAcceptance:
    """Share of the verified nodes that were accepted, by their place in the tree."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._counts: list[int] = []

    @property
    def num_trees(self) -> int:
        """Trees with at least one draft."""
        return self._counts[0] if self._counts else 0

    def observe(self, num_drafts: int, accepted_nodes: Sequence[int]) -> None:
        """Count one verified tree; nodes are counted from 1, the root is 0."""
        missing = max(0, num_drafts - len(self._rates))
        self._rates += [0.0] * missing
        self._counts += [0] * missing
        accepted = set(accepted_nodes)
        for place in range(num_drafts):
            self._counts[place] += 1
            rate = max(LEARNING_RATE, 1 / self._counts[place])
            self._rates[place] += rate * ((place + 1 in accepted) - self._rates[place])

    def gains(self, num_drafts: int) -> list[float]:
        """Expected accepted tokens of each of the first `num_drafts` nodes; never rising."""
        gains: list[float] = []
        last = UNKNOWN_FIRST / UNKNOWN_RATIO
        for rate in self._rates[:num_drafts]:
            last = min(last, rate) if gains else rate
            gains.append(last)
        while len(gains) < num_drafts:
            last *= UNKNOWN_RATIO
            gains.append(last)
        return gains
