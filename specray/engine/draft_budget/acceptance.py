"""How often the target accepts drafts, by their scores: the probabilities that a draft model gave them.

Two things are measured: how often the target accepts nodes of each score, and how scores are distributed at each place
in the tree. Together they give the expected gain of a step that verifies only nodes above some score. A request's own
acceptance (`RequestAcceptance`) scales it. `by_place` is for drafters that know no scores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specray.engine.draft_budget.costs import StepCosts, StepShape

NUM_FIRST_TREES = 32  # whole trees at the start show the acceptance of every node
MEMORY_TREES = 64  # of a request's own acceptance
MEMORY_WITHOUT_DRAFTS = 256  # steps without drafts that it outlasts: then the request is tried again
SURE_AFTER, SURE = 8, 0.9  # after so many drafts without a rejected one, a draft is accepted with this chance
MAX_MISSED_TOKENS = 16  # a draft model that missed more of a request drafts badly for the rest of it
PRIOR_TOKENS = 4.0  # accepted tokens at the average rate that a request starts with
PRIOR_TOKENS_TOGETHER = 16.0  # the same of all requests of a step, whose drafts are turned on and off together
# Lower ends of the classes of scores; a step's least score is one of them. Scores of 1 are those of drafts whose score
# is not known.
EDGES = np.array([0.0, 0.02, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.0])
MIDDLES = np.append((EDGES[:-1] + EDGES[1:]) / 2, 0.7)
MEMORY_SCORED_TREES = 512
PRIOR_NODES = 8.0  # as many nodes of each class are assumed to have been accepted as their scores say


@dataclass(slots=True)
class RequestAcceptance:
    """Accepted tokens of one request, and how many the average rates predicted; older trees count less."""

    accepted: float = 0.0
    expected: float = 0.0
    drafter: str = ""  # the one of several drafters that the request has: their averages differ
    num_missed_tokens: int = 0  # computed in steps after which the drafter was not called
    is_new_to_drafter: bool = False  # the drafter took over while it ran, and has no KV of its earlier tokens
    num_in_row: int = 0  # drafts accepted since the last rejected one
    num_last: int = 0  # drafts of the last tree that had any
    num_trees: int = 0  # trees with known scores

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
    def is_caught_up(self) -> bool:
        """Whether a draft model has computed enough of this request to draft for it."""
        return self.num_missed_tokens <= MAX_MISSED_TOKENS

    @property
    def is_representative(self) -> bool:
        """Whether acceptance of its trees predicts that of other requests with this drafter."""
        return self.is_caught_up and not self.is_new_to_drafter

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


class ScoredTree(NamedTuple):
    """A draft tree after its verification. Nodes are counted from 1, because the root is 0."""

    scores: Sequence[float]  # scores of all drafts of a tree
    num_verified: int  # number of drafts that were verified, from the first one on
    accepted_nodes: Sequence[int]


class _Nodes(NamedTuple):
    """The drafts of several trees, one after the other."""

    first: NDArray[np.int64]  # [trees + 1]: index of the first draft of each tree, then the number of drafts
    places: NDArray[np.int64]  # index of each draft in its tree
    classes: NDArray[np.int64]  # score class of each draft, see EDGES
    are_verified: NDArray[np.bool_]

    @classmethod
    def of(cls, trees: Sequence[ScoredTree]) -> "_Nodes":
        lengths = [len(tree.scores) for tree in trees]
        first = np.cumsum([0, *lengths])
        scores = np.fromiter(chain.from_iterable(tree.scores for tree in trees), np.float64, int(first[-1]))
        classes = np.maximum(np.searchsorted(EDGES, scores, side="right") - 1, 0)
        places = np.arange(len(scores)) - np.repeat(first[:-1], lengths)
        return cls(first, places, classes, places < np.repeat([tree.num_verified for tree in trees], lengths))


class ScoreAcceptance:
    """Acceptance by score, and the spread of scores by place in the tree; older trees count less."""

    def __init__(self) -> None:
        self._verified = np.zeros(len(EDGES))  # nodes of each class
        self._accepted = np.zeros(len(EDGES))
        self._spread = np.zeros((0, len(EDGES)))  # [places, classes]: share of the trees, each row sums to 1
        self._num_seen = np.zeros((0, 1))  # [places, 1]: trees that had a node there
        self.num_trees = 0

    @property
    def num_places(self) -> int:
        """Nodes of the largest tree that was seen, without the root."""
        return len(self._spread)

    def expected(self, trees: Sequence[ScoredTree]) -> list[float]:
        """The number of nodes of each tree that are expected to be accepted.

        A step has up to hundreds of trees, and one numpy call for all takes hardly longer than one for each.
        """
        nodes = _Nodes.of(trees)
        counts = np.cumsum([0.0, *np.where(nodes.are_verified, self.rates()[nodes.classes], 0.0)])[nodes.first]
        return [float(end - start) for start, end in pairwise(counts)]

    def observe(self, trees: Sequence[ScoredTree]) -> None:
        """Count trees."""
        nodes = _Nodes.of(trees)
        accepted = [
            start + node - 1
            for start, tree in zip(nodes.first[:-1], trees, strict=True)
            for node in tree.accepted_nodes
        ]
        keep = (1 - 1 / MEMORY_SCORED_TREES) ** len(trees)
        self._verified = keep * self._verified + np.bincount(nodes.classes[nodes.are_verified], minlength=len(EDGES))
        self._accepted = keep * self._accepted + np.bincount(nodes.classes[accepted], minlength=len(EDGES))
        self._observe_spread(nodes.places, nodes.classes)
        self.num_trees += len(trees)

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

    def _observe_spread(self, places: NDArray[np.int64], classes: NDArray[np.int64]) -> None:
        """Count the classes of some trees' nodes, by their places."""
        if not len(places):
            return
        num_places = max(len(self._spread), int(places.max()) + 1)
        counts = np.bincount(places * len(EDGES) + classes, minlength=num_places * len(EDGES)).reshape(num_places, -1)
        seen = counts.sum(1, keepdims=True)
        before, num_seen = np.zeros((num_places, len(EDGES))), seen.astype(np.float64)
        before[: len(self._spread)] = self._spread
        num_seen[: len(self._num_seen)] += self._num_seen
        weights = np.maximum(1 - (1 - 1 / MEMORY_SCORED_TREES) ** seen, seen / np.maximum(num_seen, 1))
        self._spread = before + weights * (counts / np.maximum(seen, 1) - before)
        self._num_seen = num_seen


def best_cut(
    acceptance: ScoreAcceptance,
    num_requests: int,
    num_drafting: int,
    most_drafts: int,
    costs: StepCosts,
    margin: float,
    factor: float = 1.0,
) -> tuple[int, float]:
    """(drafts of each request, least score to verify) with the most tokens per second; (0, 0.0): no drafts.

    `num_drafting` of the `num_requests` requests may have drafts of this drafter. A step has at most `most_drafts`, so
    with more requests than that only as many draft. They accept `factor` times as much as usual. A step with drafts
    counts as `margin` times its measured time. Ties go to fewer drafts.
    """
    num_drafting = min(num_drafting, most_drafts)
    num_places = min(acceptance.num_places, most_drafts // max(1, num_drafting))
    accepted, verified = (num_drafting * nodes[:num_places] for nodes in acceptance.gains())
    drafting = costs.rest(num_requests, np.arange(1.0, 1 + num_places))
    seconds = costs.target(num_requests + verified) + drafting[:, None]
    rates = (num_requests + np.minimum(factor * accepted, verified)) / (margin * seconds)
    plain = num_requests / costs.seconds(StepShape(num_requests, 0, 0))
    if not rates.size or rates.max() <= plain:
        return 0, 0.0
    place, cut = np.unravel_index(int(rates.argmax()), rates.shape)
    return int(place) + 1, float(EDGES[cut])
