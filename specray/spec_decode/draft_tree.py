"""Draft trees of a batch of requests, as tensors.

Plain decoding is a tree of one node; a chain is a tree with one branch. Trees stay tensors from the drafter to the
verifier. Lists are for drafters that work on the host (n-grams).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.step_tensors import ragged_places

ROOT = 0
NONE = -1  # token and parent where there is no node


class TreeLists(NamedTuple):
    """One request's tree on the host, the root included; parents[0] == -1 and parents[i] < i."""

    tokens: list[int]
    parents: list[int]


class DraftTree(NamedTuple):
    """Candidate continuations of B requests; node 0 of each is its last known token."""

    tokens: Tensor  # int64 [B, N], -1 past a tree's nodes
    parents: Tensor  # int64 [B, N], parents[:, 0] == -1, parents[:, i] < i, -1 past a tree's nodes
    num_nodes: Tensor  # int64 [B], the root included; 0: there is no tree because the drafter's logits are not finite
    max_depth: int  # deeper nodes are never accepted; known without reading the tensors
    # float32 [B, N, up to V]: the distribution that each node's children were drawn from, zeros where they were not
    # drawn; None: nowhere
    draft_probs: Tensor | None = None
    are_chains: bool = False  # whether it is known on the host that each node's parent is the node before it
    # float32 [B, N]: the drafter's probability of the path to each node, 1 at the root, never rising; None: not known
    scores: Tensor | None = None

    @classmethod
    def from_lists(cls, trees: Sequence[TreeLists], device: torch.device | str = "cpu") -> "DraftTree":
        """Trees from the host, padded to the largest one."""
        width = max((len(tree.tokens) for tree in trees), default=1)
        tokens = [tree.tokens + [NONE] * (width - len(tree.tokens)) for tree in trees]
        parents = [tree.parents + [NONE] * (width - len(tree.parents)) for tree in trees]
        packed = torch.tensor([tokens, parents], dtype=torch.int64).view(2, len(trees), width).to(device)
        num_nodes = torch.tensor([len(tree.tokens) for tree in trees], dtype=torch.int64, device=device)
        return cls(packed[0], packed[1], num_nodes, width - 1)

    @classmethod
    def roots(cls, tokens: Tensor) -> "DraftTree":
        """Trees without drafts: one node each, from int64 [B]."""
        return cls(tokens[:, None], torch.full_like(tokens[:, None], NONE), torch.ones_like(tokens), 0)

    @classmethod
    def chains(cls, tokens: Tensor) -> "DraftTree":
        """Trees of one branch each, from int64 [B, N] with their roots first."""
        num_rows, size = tokens.shape
        parents = torch.arange(-1, size - 1, device=tokens.device).expand(num_rows, -1)
        return cls(tokens, parents, torch.full_like(tokens[:, 0], size), size - 1)

    def to_lists(self) -> list[TreeLists]:
        """The trees on the host."""
        rows = zip(self.tokens.tolist(), self.parents.tolist(), self.num_nodes.tolist(), strict=True)
        return [TreeLists(tokens[:count], parents[:count]) for tokens, parents, count in rows]

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] is set if j is i or an ancestor of i. Padding nodes see only themselves."""
        num_rows, size = self.tokens.shape
        if size == 1:
            return torch.ones(num_rows, 1, 1, dtype=torch.bool, device=self.tokens.device)
        nodes = torch.arange(size, device=self.tokens.device)
        reach = ((self.parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
        for _ in range((size - 1).bit_length()):  # paths of length 1, 2, 4, …: squaring doubles them
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    def starts(self) -> Tensor:
        """int64 [B], places of the roots among the nodes of all trees, tree by tree."""
        return self.num_nodes.cumsum(0) - self.num_nodes

    def places(self, total: int) -> Tensor:
        """int64 [B, N], those of all nodes, up to `total`; any one where there is no node."""
        return ragged_places(self.num_nodes, self.tokens.shape[1], total)

    def is_valid(self, vocab_size: int) -> Tensor:
        """bool [B]: all tokens are in the vocabulary and every parent comes before its child."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_token = (self.tokens >= 0) & (self.tokens < vocab_size)
        is_parent = (self.parents >= 0) & (self.parents < nodes)
        is_parent[:, ROOT] = True
        return ((is_token & is_parent) | (nodes >= self.num_nodes[:, None])).all(-1)

    def to(self, device: torch.device) -> "DraftTree":
        tokens, parents, num_nodes = (part.to(device) for part in (self.tokens, self.parents, self.num_nodes))
        probs, scores = (None if part is None else part.to(device) for part in (self.draft_probs, self.scores))
        return DraftTree(tokens, parents, num_nodes, self.max_depth, probs, self.are_chains, scores)

    def select(self, rows: Tensor) -> "DraftTree":
        """The trees of `rows` int64 [n], ascending and each once; all rows are the tree itself."""
        if len(rows) == len(self.num_nodes):
            return self
        tokens, parents, num_nodes = (
            part.index_select(0, rows) for part in (self.tokens, self.parents, self.num_nodes)
        )
        probs, scores = (
            None if part is None else part.index_select(0, rows) for part in (self.draft_probs, self.scores)
        )
        return DraftTree(tokens, parents, num_nodes, self.max_depth, probs, self.are_chains, scores)

    def repeats_sibling(self) -> Tensor:
        """bool [B, N]: nodes that repeat the token of an earlier sibling. The first of equal siblings counts."""
        if self.tokens.shape[1] <= 2:
            return torch.zeros_like(self.tokens, dtype=torch.bool)
        is_same = (self.tokens[:, :, None] == self.tokens[:, None, :]) & (
            self.parents[:, :, None] == self.parents[:, None, :]
        )
        return is_same.tril(-1).any(-1)


class TreeBuffers:
    """Trees of at most `max_rows` requests and `max_nodes` nodes at fixed addresses, where CUDA graphs store them."""

    def __init__(self, max_rows: int, max_nodes: int, device: torch.device) -> None:
        self._nodes = torch.full((2, max_rows, max_nodes), NONE, dtype=torch.int64, device=device)  # tokens, parents
        self._num_nodes = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._scores = torch.zeros(max_rows, max_nodes, device=device)
        self._has_scores = False
        self.max_depth = 0

    def put(self, tree: DraftTree) -> None:
        """Keep these trees. All that are ever put have scores or none has.

        No replay repeats what this sets in Python, so `max_depth` is that of the deepest.
        """
        rows, width = tree.tokens.shape
        self.max_depth = max(self.max_depth, tree.max_depth)
        for part, values in zip(self._nodes, (tree.tokens, tree.parents), strict=True):
            part[:rows, :width].copy_(values)
        self._num_nodes[:rows].copy_(tree.num_nodes)
        self._has_scores = tree.scores is not None
        if tree.scores is not None:
            self._scores[:rows, :width].copy_(tree.scores)

    def trees(self, num_rows: int, num_nodes: int) -> DraftTree:
        """The first trees that were put last, which have up to `num_nodes` nodes."""
        tokens, parents = self._nodes[:, :num_rows, :num_nodes]
        scores = self._scores[:num_rows, :num_nodes] if self._has_scores else None
        depth = min(self.max_depth, num_nodes - 1)
        return DraftTree(tokens, parents, self._num_nodes[:num_rows], depth, scores=scores)
