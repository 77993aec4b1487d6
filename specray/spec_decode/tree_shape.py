"""Sizes of EAGLE's dynamic trees; `tree_sizes` reads them from a configuration."""

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`num_steps` levels; `topk` children for each node that is expanded, and as many expanded nodes in a level."""

    num_steps: int
    topk: int
    num_draft_tokens: int  # root included
    returns_draft_probs: bool = False  # whether a chain has the distributions that its nodes were drawn from

    @property
    def pool_size(self) -> int:
        """Number of scored candidates: topk at the first level, topk² at each further level."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @functools.cache  # noqa: B019 (a process has few shapes)
    def limited(self, num_steps: int, num_drafts: int) -> "TreeShape":
        """The shape whose trees are the best `num_drafts` nodes, of `num_steps` levels, of trees of this shape.

        A node is among the best n only if its ancestors and its better siblings are, so no more than n children of a
        node and no more than n nodes of a level matter.
        """
        num_drafts = min(self.num_draft_tokens - 1, num_drafts)
        num_steps = min(self.num_steps, num_steps, num_drafts)  # n nodes have n levels at most
        shape = replace(self, num_steps=max(1, num_steps), topk=max(1, min(self.topk, num_drafts)))
        return replace(shape, num_draft_tokens=1 + max(1, min(num_drafts, shape.pool_size)))
