"""Draft trees of a batch of requests, as tensors.

Plain decoding is a tree of one node; a chain is a tree with one branch. Trees stay tensors from the drafter to the
verifier. Lists are for drafters that work on the host (n-grams).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = 0
NONE = -1  # token and parent where there is no node


class TreeLists(NamedTuple):
    """One request's tree on the host, the root included; parents[0] == -1 and parents[i] < i."""

    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Candidate continuations of B requests; node 0 of each is its last known token."""

    tokens: Tensor  # int64 [B, N], -1 past a tree's nodes
    parents: Tensor  # int64 [B, N], parents[:, 0] == -1, parents[:, i] < i, -1 past a tree's nodes
    num_nodes: Tensor  # int64 [B], the root included; 0: there is no tree because the drafter's logits are not finite
    max_depth: int  # deeper nodes are never accepted; known without reading the tensors
    # float32 [B, N, up to V]: the distribution that each node's children were drawn from, zeros where they were not
    # drawn; None: nowhere
    draft_probs: Tensor | None = None

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
        """bool [B, N, N]: [b, i, j] is set if j is i or an ancestor of i. Past a tree's nodes, i has only itself."""
        num_rows, size = self.tokens.shape
        if size == 1:
            return torch.ones(num_rows, 1, 1, dtype=torch.bool, device=self.tokens.device)
        nodes = torch.arange(size, device=self.tokens.device)
        reach = ((self.parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
        for _ in range((size - 1).bit_length()):  # paths of length 1, 2, 4, …: squaring doubles them
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    def is_valid(self, vocab_size: int) -> Tensor:
        """bool [B]: all tokens are in the vocabulary and every parent comes before its child."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_token = (self.tokens >= 0) & (self.tokens < vocab_size)
        is_parent = (self.parents >= 0) & (self.parents < nodes)
        is_parent[:, ROOT] = True
        return ((is_token & is_parent) | (nodes >= self.num_nodes[:, None])).all(-1)

    def to(self, device: torch.device) -> "DraftTree":
        tokens, parents, num_nodes = (part.to(device) for part in (self.tokens, self.parents, self.num_nodes))
        probs = None if self.draft_probs is None else self.draft_probs.to(device)
        return DraftTree(tokens, parents, num_nodes, self.max_depth, probs)

    def select(self, rows: Tensor) -> "DraftTree":
        """The trees of `rows` int64 [n], ascending and each once; all rows are the tree itself."""
        if len(rows) == len(self.num_nodes):
            return self
        probs = None if self.draft_probs is None else self.draft_probs.index_select(0, rows)
        tokens, parents, num_nodes = (
            part.index_select(0, rows) for part in (self.tokens, self.parents, self.num_nodes)
        )
        return DraftTree(tokens, parents, num_nodes, self.max_depth, probs)

    def scattered(self, places: Tensor, others: "DraftTree") -> "DraftTree":
        """`others` with tree `places[i]` (int64 [B], ascending and each once) replaced by this tree's row i."""
        if len(places) == len(others.num_nodes):
            return self
        width = max(self.tokens.shape[1], others.tokens.shape[1])

        def merge(ours: Tensor, theirs: Tensor) -> Tensor:
            padded, rows = (F.pad(part, (0, width - part.shape[1]), value=NONE) for part in (theirs, ours))
            return padded.index_copy(0, places, rows)

        probs = None if others.draft_probs is None else others.draft_probs.index_fill(0, places, 0.0)
        if self.draft_probs is not None:
            probs = self.draft_probs.new_zeros(len(others.num_nodes), *self.draft_probs.shape[1:])
            probs.index_copy_(0, places, self.draft_probs)
        return DraftTree(
            merge(self.tokens, others.tokens),
            merge(self.parents, others.parents),
            others.num_nodes.index_copy(0, places, self.num_nodes),
            max(self.max_depth, others.max_depth),
            probs,
        )

    def limited_to_depth(self, num_steps: Tensor) -> "DraftTree":
        """The trees without nodes deeper than `num_steps` int64 [B]. The other nodes keep their order."""
        depths = self.ancestors().sum(-1) - 1
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        keep = (depths <= num_steps[:, None]) & (nodes < self.num_nodes[:, None])
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)
        places = keep.cumsum(-1) - 1  # of the nodes that are kept
        num_nodes = keep.sum(-1)
        parents = self.parents.gather(1, order)
        parents = torch.where(parents < 0, parents, places.gather(1, parents.clamp(min=0)))
        is_past = nodes >= num_nodes[:, None]
        tokens = self.tokens.gather(1, order).masked_fill(is_past, NONE)
        probs = self.draft_probs
        if probs is not None:
            probs = probs.gather(1, order[:, :, None].expand(-1, -1, probs.shape[-1]))
        return DraftTree(tokens, parents.masked_fill(is_past, NONE), num_nodes, self.max_depth, probs)
