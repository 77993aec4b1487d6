"""Buffers with fixed addresses, in which CUDA graphs store the trees that they draft."""

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree


class TreeBuffers:
    """Trees of up to `max_rows` requests and `max_nodes` nodes."""

    def __init__(self, max_rows: int, max_nodes: int, device: torch.device) -> None:
        self._nodes = torch.full((2, max_rows, max_nodes), NONE, dtype=torch.int64, device=device)  # tokens, parents
        self._num_nodes = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.max_depth = 0  # of the trees that were put last

    def put(self, tree: DraftTree) -> None:
        """Keep these trees; all that are ever put have the same `max_depth`, which no replay repeats."""
        rows, width = tree.tokens.shape
        self.max_depth = tree.max_depth
        for part, values in zip(self._nodes, (tree.tokens, tree.parents), strict=True):
            part[:rows, :width].copy_(values)
        self._num_nodes[:rows].copy_(tree.num_nodes)

    def trees(self, num_rows: int) -> DraftTree:
        """The first trees that were put last."""
        tokens, parents = self._nodes[:, :num_rows]
        return DraftTree(tokens, parents, self._num_nodes[:num_rows], self.max_depth)
