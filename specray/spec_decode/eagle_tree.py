"""The shape of EAGLE's dynamic tree and the choice of its nodes: pure functions of scores.

Names and rules are SGLang's: `num_steps` levels, `eagle_topk` children below a node and nodes expanded per level,
`num_draft_tokens` nodes in the end, the root included. Not here: where scores come from (`eagle`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.draft_tree import NONE, DraftTree

logger = logging.getLogger(__name__)

# SGLang's automatic (num_steps, eagle_topk, num_draft_tokens) by the target's architecture.
_AUTO = {"LlamaForCausalLM": (5, 4, 8)}
_AUTO_OTHERS = (3, 1, 4)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Sizes of every draft tree."""

    num_steps: int
    topk: int
    num_draft_tokens: int  # root included
    keeps_laws: bool = False  # whether a chain comes with the laws its nodes were drawn from

    @property
    def pool_size(self) -> int:
        """Candidates that are scored: the first level's, then topk below each of topk nodes a level."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @classmethod
    def of(cls, config: SpeculativeConfig, architecture: str) -> "TreeShape":
        """The configured shape, or the automatic one for a target of `architecture` if nothing is set.

        ConfigError if only some of the three are set, or if the candidates cannot fill the tree.
        """
        wanted = {
            "num_steps": config.num_steps,
            "eagle_topk": config.eagle_topk,
            "num_draft_tokens": config.num_draft_tokens,
        }
        steps, topk, nodes = wanted.values()
        if steps is None and topk is None and nodes is None:
            steps, topk, nodes = _AUTO.get(architecture, _AUTO_OTHERS)
        if steps is None or topk is None or nodes is None:
            missing = ", ".join(name for name, value in wanted.items() if value is None)
            raise ConfigError(
                f"of speculative.num_steps, eagle_topk and num_draft_tokens, {missing} is not set; "
                "set all three, or none for automatic values"
            )
        if topk == 1 and nodes != steps + 1:
            logger.warning(
                "eagle_topk=1 drafts a chain: num_draft_tokens=%d becomes num_steps + 1 = %d", nodes, steps + 1
            )
            nodes = steps + 1
        shape = cls(steps, topk, nodes, keeps_laws=topk == 1 and config.verification == "rejection")
        if nodes - 1 > shape.pool_size:
            raise ConfigError(
                f"num_draft_tokens={nodes} wants {nodes - 1} drafts, but num_steps={steps} and eagle_topk={topk} make "
                f"{shape.pool_size} candidates; lower num_draft_tokens to {shape.pool_size + 1} or raise the others"
            )
        return shape


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
