"""The expected gain of drafts by their scores, the probabilities that the drafter gave them.

Two things are measured: how often the target accepts nodes of each score, and how scores are distributed at each place
in the tree. Together they give the expected gain of a step that verifies only nodes above some score.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specray.engine.draft_budget.costs import StepCosts, StepShape

# Lower ends of the classes of scores; a step's least score is one of them. Scores of 1 are those of drafts whose score
# is not known, such as n-grams beside a draft model.
EDGES = np.array([0.0, 0.02, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.0])
MIDDLES = np.append((EDGES[:-1] + EDGES[1:]) / 2, 0.7)
MEMORY_TREES = 256
PRIOR_NODES = 8.0  # as many nodes of each class are assumed to have been accepted as their scores say


class ScoreAcceptance:
    """Acceptance by score, and the spread of scores by place in the tree; older trees count less."""

    def __init__(self) -> None:
        self._verified = np.zeros(len(EDGES))  # nodes of each class
        self._accepted = np.zeros(len(EDGES))
        self._spread = np.zeros((0, len(EDGES)))  # [places, classes]: share of the trees, each row sums to 1
        self.num_trees = 0

    @property
    def num_places(self) -> int:
        """Nodes of the largest tree that was seen, without the root."""
        return len(self._spread)

    def observe(self, scores: Sequence[float], num_verified: int, accepted_nodes: Sequence[int]) -> float:
        """Count one tree of which the first `num_verified` nodes were verified; nodes are counted from 1.

        Returns the number of nodes that were expected to be accepted.
        """
        classes = np.searchsorted(EDGES, np.asarray(scores), side="right") - 1
        expected = float(self.rates()[classes[:num_verified]].sum())
        keep = 1 - 1 / MEMORY_TREES
        self._verified *= keep
        self._accepted *= keep
        np.add.at(self._verified, classes[:num_verified], 1.0)
        np.add.at(self._accepted, classes[np.asarray(accepted_nodes, dtype=np.int64) - 1], 1.0)
        self._observe_spread(classes)
        self.num_trees += 1
        return expected

    def rates(self) -> NDArray[np.float64]:
        """float64 [classes]: share of the verified nodes of each class that were accepted."""
        rates: NDArray[np.float64] = (self._accepted + PRIOR_NODES * MIDDLES) / (self._verified + PRIOR_NODES)
        return rates

    def gains(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(accepted, verified) nodes of a tree, float64 [places, classes] each.

        Entry [k, c] is expected for a tree of k + 1 drafts of which those with scores below EDGES[c] are not verified.
        """

        def sums(shares: NDArray[np.float64]) -> NDArray[np.float64]:
            from_class: NDArray[np.float64] = shares[:, ::-1].cumsum(1)[:, ::-1].cumsum(0)
            return from_class

        return sums(self._spread * self.rates()), sums(self._spread)

    def _observe_spread(self, classes: NDArray[np.int64]) -> None:
        if (new := len(classes) - len(self._spread)) > 0:
            self._spread = np.vstack((self._spread, np.eye(len(EDGES))[classes[-new:]]))
        rate = max(1 / MEMORY_TREES, 1 / (self.num_trees + 1))
        spread = self._spread[: len(classes)]
        spread *= 1 - rate
        spread[np.arange(len(classes)), classes] += rate


def best_cut(acceptance: ScoreAcceptance, num_requests: int, costs: StepCosts, margin: float) -> tuple[int, float]:
    """(drafts of each request, least score to verify) with the most tokens per second; (0, 0.0): no drafts.

    A step with drafts counts as `margin` times its measured time. Ties go to fewer drafts.
    """
    accepted, verified = acceptance.gains()
    drafting = costs.rest(num_requests, np.arange(1.0, 1 + acceptance.num_places))
    seconds = costs.target(num_requests * (1 + verified)) + drafting[:, None]
    rates = num_requests * (1 + accepted) / (margin * seconds)
    plain = num_requests / costs.seconds(StepShape(num_requests, 0, 0))
    if not rates.size or rates.max() <= plain:
        return 0, 0.0
    place, cut = np.unravel_index(int(rates.argmax()), rates.shape)
    return int(place) + 1, float(EDGES[cut])
