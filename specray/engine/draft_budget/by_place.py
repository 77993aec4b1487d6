"""How often the target accepts drafts, by their place in the tree, and how many to verify, for drafters without scores.

Drafters put the most likely nodes first, so the first n nodes are their best tree of n nodes, and node k is accepted
less often than node k - 1.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specray.engine.draft_budget.acceptance import NUM_FIRST_TREES, RequestAcceptance

UNKNOWN_FIRST, UNKNOWN_RATIO = 0.6, 0.8  # assumed until measured: of the first node, and of a node to the one before
LEARNING_RATE = 1 / 256  # of a tree, once more than this many were measured
# Nodes that bring less are never worth a row of a forward: with a step of one row taking as long as a plain step, they
# would have to cost less than a hundredth of it.
LEAST_GAIN = 0.01
Floats = NDArray[np.float64]


class NodeAcceptance:
    """Share of the verified nodes that were accepted, by their place in the tree."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._counts: list[int] = []

    @property
    def num_trees(self) -> int:
        """Trees with at least one draft."""
        return self._counts[0] if self._counts else 0

    def record_tree(self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int]) -> None:
        """Count one verified tree of a request, for it and, if its trees resemble those of others, for all."""
        request.add(len(accepted_nodes), sum(self.gains(num_drafts)))
        repeats = request.repeats and self.num_trees >= NUM_FIRST_TREES
        if not repeats and not request.is_new_to_drafter:
            self.observe(num_drafts, accepted_nodes)
        request.count_in_row(num_drafts, len(accepted_nodes))

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


def allocate(
    gains: Sequence[Sequence[float]],
    step_seconds: Callable[[Floats, Floats], Floats],
    most_drafts: int,
    num_others: int = 0,
) -> list[int]:
    """Draft tokens for each request, in descending order of gain, as many as generate the most tokens per second.

    `gains[i][k]` are the tokens that draft k + 1 of request i is expected to bring, never rising in k.
    `step_seconds(n, m)` are the times of steps with n drafts in all, and with m for the request that has most. It is
    called once for many choices: hundreds of requests offer a thousand nodes in every step. One request with a long
    certain tree would make the step dear for all, so limits of m are compared too: 1, 2, 4, … At most `most_drafts` are
    chosen; ties go to fewer drafts, older requests and earlier nodes. `num_others` more requests of the step generate a
    token each.
    """
    offers = sorted(
        (-gain, place, row)
        for row, row_gains in enumerate(gains)
        for place, gain in enumerate(row_gains)
        if gain >= LEAST_GAIN
    )
    negative_gains, places, rows = np.array(offers, np.float64).reshape(-1, 3).T
    most_of_any = max(map(len, gains), default=0)
    best, chosen = -np.inf, rows[:0]
    powers = (1 << power for power in range(most_of_any.bit_length()))
    for limit in [*(power for power in powers if power < most_of_any), most_of_any]:
        kept = np.flatnonzero(places < limit)[:most_drafts]
        tokens = num_others + len(gains) - np.cumsum([0.0, *negative_gains[kept]])
        most = np.maximum.accumulate([0.0, *(places[kept] + 1.0)])
        rates = tokens / step_seconds(np.arange(len(kept) + 1.0), most)
        if rates.max() > best:
            best, chosen = rates.max(), rows[kept[: int(rates.argmax())]]
    num_drafts: list[int] = np.bincount(chosen.astype(np.int64), minlength=len(gains)).tolist()
    return num_drafts
