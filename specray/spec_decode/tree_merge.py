"""One draft tree from the trees of several sources, and how often each source is right. Pure functions and tables.

A source assigns each node of its tree to a class, its `evidence`, for example by the length of an n-gram's match.
`Calibration` counts, by class, how often nodes followed their parents in real text. It tells requests apart by their
`FollowedShare`, because equal matches are right far more often in a text that is being repeated than in any other.
Nodes with equal paths in several trees become one node, with the highest rate of its sources.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from specray.spec_decode.draft_tree import NONE, ROOT, TreeLists

LEAST_SURVIVAL = 0.01  # less likely nodes are never worth a row of a forward; see draft_budget.by_place.LEAST_GAIN
MEMORY_NODES = 512  # of one class; older ones count less
PRIOR_NODES = 4.0  # as many nodes are assumed to have been as the prior says
MEMORY_LEVELS = 16  # of trees, that a share remembers; older ones count less
NUM_SHARE_CLASSES = 6

Rate = Callable[[int], float]  # evidence -> how often such nodes follow their parents


class Proposal(NamedTuple):
    """One source's tree for a request."""

    source: str
    tree: TreeLists
    evidence: list[int]  # of each node; the root's means nothing


class ScoredLists(NamedTuple):
    """A tree, and the probability that the text follows the path to each node: 1 at the root, non-increasing below."""

    tree: TreeLists
    scores: list[float]


class FollowedShare:
    """Share of the recent tree levels of one source in which a node was the next token of the request's text."""

    def __init__(self) -> None:
        self._share = 0.5  # nothing is known yet

    @property
    def share_class(self) -> int:
        """The class: 0 (never) to NUM_SHARE_CLASSES - 1 (always)."""
        return min(NUM_SHARE_CLASSES - 1, int(NUM_SHARE_CLASSES * self._share))

    def observe(self, follows: bool) -> None:
        """Count a level of a tree."""
        self._share += (follows - self._share) / MEMORY_LEVELS


class Calibration:
    """How often nodes of a source follow their parents, by share and evidence; `prior` holds until they were seen."""

    def __init__(self, prior: Rate) -> None:
        self._prior = prior
        self._seen: dict[tuple[int, int], float] = {}
        self._followed: dict[tuple[int, int], float] = {}

    def rate_of(self, share: FollowedShare) -> Rate:
        """The rates for a request, until its share changes."""
        share_class = share.share_class

        def rate(evidence: int) -> float:
            seen, followed = (counts.get((share_class, evidence), 0.0) for counts in (self._seen, self._followed))
            return (followed + PRIOR_NODES * self._prior(evidence)) / (seen + PRIOR_NODES)

        return rate

    def observe(self, proposal: Proposal, text: Sequence[int], share: FollowedShare) -> None:
        """Count the nodes of a request's tree along `text`, the tokens that followed its root."""
        children, node, share_class = children_of(proposal.tree), ROOT, share.share_class
        for token in text:
            following = NONE
            for child in children[node]:
                follows = proposal.tree.tokens[child] == token
                self._count((share_class, proposal.evidence[child]), follows)
                if follows and following == NONE:
                    following = child
            if children[node]:
                share.observe(following != NONE)
            if following == NONE:
                return
            node = following

    def _count(self, place: tuple[int, int], follows: bool) -> None:
        keep = 1 - 1 / MEMORY_NODES
        self._seen[place] = keep * self._seen.get(place, 0.0) + 1
        self._followed[place] = keep * self._followed.get(place, 0.0) + follows


def merge(
    parts: Sequence[tuple[Proposal, Rate]], root: int, most: int, max_depth: int, least: float = LEAST_SURVIVAL
) -> ScoredLists:
    """At most `most` nodes of all trees below `root`, the most probable first, so that parents precede children.

    Nodes deeper than `max_depth`, or less probable than `least`, are left out. Rates of siblings sum to 1 at most.
    """
    trees = [(proposal, rate, children_of(proposal.tree)) for proposal, rate in parts]
    tokens, parents, scores = [root], [NONE], [1.0]
    heap: list[tuple[float, int, int, int, int, list[tuple[int, int]]]] = []
    order = count()  # ties go to the node that was found first

    def push_children(parent: int, depth: int, places: Sequence[tuple[int, int]]) -> None:
        """`places`: (tree, node) of each source that has the parent."""
        found: dict[int, list[tuple[int, int]]] = {}
        rates: dict[int, float] = {}
        for number, node in places:
            proposal, rate, children = trees[number]
            for child in children[node]:
                token = proposal.tree.tokens[child]
                found.setdefault(token, []).append((number, child))
                rates[token] = max(rates.get(token, 0.0), rate(proposal.evidence[child]))
        scale = scores[parent] / max(1.0, sum(rates.values()))
        for token, below in found.items():
            heappush(heap, (-scale * rates[token], next(order), parent, depth, token, below))

    push_children(ROOT, 1, [(number, ROOT) for number in range(len(trees))])
    while heap and -heap[0][0] >= least and len(tokens) <= most:
        negative, _, parent, depth, token, below = heappop(heap)
        if depth > max_depth:
            continue
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        push_children(len(tokens) - 1, depth + 1, below)
    return ScoredLists(TreeLists(tokens, parents), scores)


def children_of(tree: TreeLists) -> list[list[int]]:
    """The children of each node, in order."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent != NONE:
            children[parent].append(node)
    return children
