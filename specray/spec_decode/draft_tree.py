"""The tree is a type: candidate continuations of a batch of requests, and what follows from their shape.

Plain decoding is a tree of one node, a chain a tree with one branch. Not here: how trees are made
(drafters) or judged (`verifier`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = 0
NONE = -1  # token and parent of what is not a node


class RowTree(NamedTuple):
    """One request's tree as lists, root included; parents[0] == -1 and parents[i] < i."""

    tokens: list[int]
    parents: list[int]

    def or_root(self, vocab_size: int) -> "RowTree":
        """This tree, or its root alone if a drafter made nonsense: foreign tokens, parents that do not come first."""
        tokens_known = all(0 <= token < vocab_size for token in self.tokens)
        parents_first = all(0 <= parent < node for node, parent in enumerate(self.parents[1:], start=1))
        return self if tokens_known and parents_first else RowTree(self.tokens[:1], [NONE])


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Candidate continuations of B requests; node 0 of each is its last known token."""

    tokens: Tensor  # int64 [B, N], -1 past a row's nodes
    parents: Tensor  # int64 [B, N], parents[:, 0] == -1, parents[:, i] < i, -1 past a row's nodes
    num_nodes: list[int]  # B counts, the root included
    # [B, N, up to V]: law each node's children were drawn from, zeros where they are no draws; None: so everywhere
    draft_probs: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[RowTree], draft_probs: Tensor | None = None) -> "DraftTree":
        """Pad rows to the widest one."""
        width = max((len(row.tokens) for row in rows), default=1)
        tokens = [row.tokens + [NONE] * (width - len(row.tokens)) for row in rows]
        parents = [row.parents + [NONE] * (width - len(row.parents)) for row in rows]
        shape = (len(rows), width)
        return cls(
            torch.tensor(tokens, dtype=torch.int64).view(shape),
            torch.tensor(parents, dtype=torch.int64).view(shape),
            [len(row.tokens) for row in rows],
            draft_probs,
        )

    def rows(self) -> list[RowTree]:
        """The rows as lists: a copy to the host."""
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        return [RowTree(t[:n], p[:n]) for t, p, n in zip(tokens, parents, self.num_nodes, strict=True)]

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: entry [b, i, j] says that j is i or an ancestor of i. Past a row's nodes: only itself."""
        num_rows, size = self.tokens.shape
        if size == 1:  # plain decoding: every step comes by
            return torch.ones(num_rows, 1, 1, dtype=torch.bool, device=self.tokens.device)
        eye = torch.eye(size, dtype=torch.float32, device=self.tokens.device)
        reach = eye + torch.nn.functional.one_hot(self.parents + 1, size + 1)[..., 1:].float()
        for _ in range((size - 1).bit_length()):  # paths of length 1, 2, 4, …: squaring doubles them
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    def depths(self) -> Tensor:
        """int64 [B, N]: edges between a node and its root."""
        return depths_of(self.ancestors())


def depths_of(ancestors: Tensor) -> Tensor:
    """Depths [B, N] of a tree from its ancestors [B, N, N], for who has these already."""
    return ancestors.sum(-1) - 1
