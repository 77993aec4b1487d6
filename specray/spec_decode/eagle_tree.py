"""The choice of the nodes of EAGLE's dynamic tree: pure functions of scores.

Not here: how large it is (`tree_shape`), and where scores come from (`eagle`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree


@dataclass(slots=True, eq=False)
class CandidatePool:
    """All candidates of B trees in the order they were made; flat index f is a child of entry f // topk of `expanded`.

    Entry 0 of `expanded` stands for the root, entry r > 0 for the candidate whose flat index it holds.
    """

    topk: int
    scores: Tensor  # float32 [B, pool]: probability of the whole path
    tokens: Tensor  # int64 [B, pool]
    expanded: Tensor  # int64 [B, 1 + expanded nodes]

    @classmethod
    def of_roots(cls, scores: Tensor, tokens: Tensor) -> "CandidatePool":
        """The first level: the roots' children, [B, topk] each. All of them will be expanded, in order."""
        num_rows, topk = tokens.shape
        root = torch.full((num_rows, 1), NONE, dtype=torch.int64, device=tokens.device)
        return cls(topk, scores, tokens, root)

    def expand(self, frontier: Tensor, scores: Tensor, tokens: Tensor) -> None:
        """Add the children, [B, topk, topk] each, of the candidates with flat indexes `frontier` [B, topk]."""
        self.expanded = torch.cat((self.expanded, frontier), 1)
        self.scores = torch.cat((self.scores, scores.flatten(1)), 1)
        self.tokens = torch.cat((self.tokens, tokens.flatten(1)), 1)

    def best_of_last(self) -> Tensor:
        """Flat indexes [B, topk] of the best candidates of the level added last, best first."""
        level = min(self.scores.shape[1], self.topk**2) if self.expanded.shape[1] > 1 else self.topk
        start = self.scores.shape[1] - level
        return start + _best(self.scores[:, start:], self.topk)

    def tree(self, roots: Sequence[int], num_drafts: int) -> DraftTree:
        """The `num_drafts` candidates with the highest scores, the highest first: the beginning of it is the best tree
        of that many nodes.

        A child never scores more than its parent, and of equals the earlier is taken, so parents come first. (SGLang
        has the same nodes in the order of their flat indexes.)
        """
        chosen = _best(self.scores, num_drafts)
        parents = self.expanded.gather(1, chosen // self.topk)
        numbers = torch.zeros(len(chosen), self.scores.shape[1] + 1, dtype=torch.int64, device=chosen.device)
        nodes = torch.arange(1, num_drafts + 1, device=chosen.device).expand_as(chosen)
        numbers.scatter_(1, chosen + 1, nodes)  # flat index + 1 -> node; NONE + 1 stays the root, 0
        tokens = self.tokens.gather(1, chosen)
        root = torch.tensor(roots, dtype=torch.int64)[:, None]
        return DraftTree(
            torch.cat((root, tokens.cpu()), 1),
            torch.cat((torch.full_like(root, NONE), numbers.gather(1, parents + 1).cpu()), 1),
            [1 + num_drafts] * len(roots),
        )


def _best(scores: Tensor, count: int) -> Tensor:
    """Indexes [B, count] of the highest scores; of equal ones the lower index, which topk does not promise."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
