"""Selection of the nodes of EAGLE-2's dynamic tree (Li et al., arXiv:2406.16858), from their scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree


@dataclass(slots=True, eq=False)
class CandidatePool:
    """All candidates of B trees in the order they were made.

    The candidate with flat index f is a child of entry f // topk of `expanded`. Entry 0 is the root, entry r > 0 the
    candidate with the flat index `expanded[r]`.
    """

    topk: int
    scores: Tensor  # float32 [B, pool]: probability of the path from the root
    tokens: Tensor  # int64 [B, pool]
    expanded: Tensor  # int64 [B, 1 + expanded nodes]
    num_levels: int = 1

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
        self.num_levels += 1

    def best_of_last(self) -> Tensor:
        """Flat indexes [B, topk] of the best candidates of the level added last, best first."""
        level = min(self.scores.shape[1], self.topk**2) if self.expanded.shape[1] > 1 else self.topk
        start = self.scores.shape[1] - level
        return start + _best(self.scores[:, start:], self.topk)

    def tree(self, roots: Tensor, num_drafts: int) -> DraftTree:
        """The `num_drafts` candidates with the highest scores, the highest first, below `roots` int64 [B].

        The first n nodes are therefore the best tree of n nodes. A child never scores more than its parent, and ties go
        to the earlier candidate, so parents come first. (SGLang orders the same nodes by flat index.)
        A tree whose scores are not finite has no nodes.
        """
        chosen = _best(self.scores, num_drafts)
        parents = self.expanded.gather(1, chosen // self.topk)
        numbers = torch.zeros(len(chosen), self.scores.shape[1] + 1, dtype=torch.int64, device=chosen.device)
        nodes = torch.arange(1, num_drafts + 1, device=chosen.device).expand_as(chosen)
        numbers.scatter_(1, chosen + 1, nodes)  # flat index + 1 -> node; NONE + 1 stays the root, 0
        root, scores = roots[:, None], self.scores.gather(1, chosen)
        return DraftTree(
            torch.cat((root, self.tokens.gather(1, chosen)), 1),
            torch.cat((torch.full_like(root, NONE), numbers.gather(1, parents + 1)), 1),
            self.scores.isfinite().all(-1) * (1 + num_drafts),
            self.num_levels,
            scores=torch.cat((torch.ones_like(scores[:, :1]), scores), 1),
        )


def _best(scores: Tensor, count: int) -> Tensor:
    """Indexes [B, count] of the highest scores; ties go to the lower index, which `topk` does not guarantee."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
