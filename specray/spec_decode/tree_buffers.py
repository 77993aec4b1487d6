"""Buffers with fixed addresses, in which CUDA graphs store the trees that they draft."""

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree


class TreeBuffers:
    """Trees of up to `max_rows` requests and `max_nodes` nodes."""

    def __init__(self, max_rows: int, max_nodes: int, device: torch.device) -> None:
        self._nodes = torch.full((2, max_rows, max_nodes), NONE, dtype=torch.int64, device=device)  # tokens, parents
        self._num_nodes = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._scores = torch.zeros(max_rows, max_nodes, device=device)
        self._has_scores = False
        self.max_depth = 0  # of the trees that were put last

    def put(self, tree: DraftTree) -> None:
        """Keep these trees. All that are ever put have the same `max_depth`, and all have scores or none has.

        No replay repeats what this sets in Python.
        """
        rows, width = tree.tokens.shape
        self.max_depth = tree.max_depth
        for part, values in zip(self._nodes, (tree.tokens, tree.parents), strict=True):
            part[:rows, :width].copy_(values)
        self._num_nodes[:rows].copy_(tree.num_nodes)
        self._has_scores = tree.scores is not None
        if tree.scores is not None:
            self._scores[:rows, :width].copy_(tree.scores)

    def trees(self, num_rows: int) -> DraftTree:
        """The first trees that were put last."""
        tokens, parents = self._nodes[:, :num_rows]
        scores = self._scores[:num_rows] if self._has_scores else None
        return DraftTree(tokens, parents, self._num_nodes[:num_rows], self.max_depth, scores=scores)
