"""Trees of a drafter in another process that wait for the next step.

They came through a socket, so the host knows them. The device gets them by one copy, and nothing is read back from it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import TreeRows
from specray.step import DraftLimit


class ReceivedTree(NamedTuple):
    """A tree that is valid."""

    nodes: TreeLists
    scores: list[float]  # see `DraftTree.scores`; empty: not known

    def size(self, root: int, limit: DraftLimit) -> tuple[int, list[float]]:
        """(number of nodes within `limit`, the scores of those that are not too many) for a last known token."""
        tokens = self.nodes.tokens
        if tokens[0] != root:
            return 1, []
        scores = self.scores[: limit.num_tokens + 1] or [1.0] * min(len(tokens), limit.num_tokens + 1)
        return max(1, sum(score >= limit.min_score for score in scores)), scores[1:]


class ReceivedTrees:
    """Trees by slot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trees: dict[int, ReceivedTree] = {}
        self.scores: list[list[float]] = []  # see `DraftSource.scores`

    def put(self, slots: Sequence[int], trees: Sequence[ReceivedTree]) -> None:
        """Keep the trees of `slots`; they replace older ones."""
        self._trees |= zip(slots, trees, strict=True)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the trees of these slots."""
        for slot in slots:
            self._trees.pop(slot, None)

    def take(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
        """See `DraftSource.collect`. Taking a tree removes it."""
        found = [self._trees.pop(slot, None) for slot, _ in rows.host]
        cuts = any(limit.min_score for limit in draft_limits)
        knows_scores = cuts and any(tree is not None and tree.scores for tree in found)
        self.scores, trees = [], []
        for tree, (_, root), limit in zip(found, rows.host, draft_limits, strict=True):
            size, scores = (1, []) if tree is None else tree.size(root, limit)
            if knows_scores:
                self.scores.append(scores)
            known = TreeLists([root], [NONE]) if tree is None or size == 1 else tree.nodes
            trees.append(TreeLists(known.tokens[:size], known.parents[:size]))
        return packed(trees, self._device), [len(tree.tokens) for tree in trees]


def packed(trees: Sequence[TreeLists], device: torch.device) -> DraftTree:
    """Trees on `device`, by one copy."""
    width = max(len(tree.tokens) for tree in trees)
    rows = []
    for tree in trees:
        padding = [NONE] * (width - len(tree.tokens))
        rows.append([len(tree.tokens), *tree.tokens, *padding, *tree.parents, *padding])
    columns = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    num_nodes, tokens, parents = columns.tensor_split((1, 1 + width), 1)
    are_chains = all(tree.parents == list(range(NONE, len(tree.parents) - 1)) for tree in trees)
    return DraftTree(tokens, parents, num_nodes[:, 0], width - 1, None, are_chains)
