"""Draft trees that wait for the next step."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.host_copy import HostCopy
from specray.ops.step_tensors import TreesWanted, TreeTensors
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import UnsizedTrees
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.tree_edits import limit_depth
from specray.step import DraftLimit


class PendingTrees:
    """Trees that wait for the next step, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        tokens, parents = torch.full((2, num_slots, 1), NONE, dtype=torch.int64, device=device)
        num_nodes = torch.full((num_slots,), NONE, dtype=torch.int64, device=device)  # NONE: no tree is pending
        self._parts = TreeTensors(tokens, parents, num_nodes, None)  # no scores: never known
        self._max_depth = 0
        self._probs: tuple[Tensor, Tensor] | None = None  # (slots, DraftTree.draft_probs) of the last trees
        self.scores: list[list[float]] = []  # see `DraftSource.scores`
        self.has_broken = False  # trees were read whose drafter's logits are not finite; the reader resets it
        self._ops = step_ops(device).trees()

    def put(self, slots: Tensor, tree: DraftTree) -> None:
        """Keep the trees of `slots` int64 [B]; they replace older ones."""
        tokens, parents, num_nodes, scores = self._parts
        if (missing := tree.tokens.shape[1] - tokens.shape[1]) > 0:
            tokens, parents = (F.pad(part, (0, missing), value=NONE) for part in (tokens, parents))
            scores = None if scores is None else F.pad(scores, (0, missing))
            self._parts = TreeTensors(tokens, parents, num_nodes, scores)
        if tree.scores is not None and scores is None:
            self._parts = self._parts._replace(scores=torch.ones_like(tokens, dtype=torch.float32))
        self._ops.put(self._parts, slots, TreeTensors(tree.tokens, tree.parents, tree.num_nodes, tree.scores))
        self._max_depth = max(self._max_depth, tree.max_depth)
        self._probs = None if tree.draft_probs is None else (slots, tree.draft_probs)

    def drop(self, slots: Sequence[int] | Tensor) -> None:
        """Forget the trees of these slots."""
        if len(slots) and self._max_depth:
            self._parts.num_nodes[torch.as_tensor(slots, device=self._parts.num_nodes.device)] = NONE

    def take(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> UnsizedTrees:
        """The trees of `DraftSource.take_unsized`, whose arguments these are. Taking a tree removes it."""
        if not self._max_depth:
            return UnsizedTrees.roots(roots)
        cuts = self._parts.scores is not None and any(limit.min_score for limit in draft_limits)
        most, least = torch.from_numpy(np.array([limit.num_tokens + 1 for limit in draft_limits], np.int64)), None
        most = most.to(slots.device, non_blocking=True)
        if cuts:
            least = torch.tensor([limit.min_score for limit in draft_limits]).to(slots.device, non_blocking=True)
        taken = self._ops.take(self._parts, TreesWanted(slots, roots, most, least), self._vocab_size)
        tokens, parents, num_nodes, report = taken
        width = tokens.shape[1]
        tree = DraftTree(tokens, parents, num_nodes, min(self._max_depth, width - 1), self._take_probs(slots))
        bounds = [min(limit.num_tokens + 1, width) for limit in draft_limits]
        to_host = HostCopy(report)  # drafting's one
        return UnsizedTrees(tree, bounds, partial(self._read, tree, to_host))

    def _read(self, taken: DraftTree, report: HostCopy) -> tuple[DraftTree, list[int]]:
        """(trees, their numbers of nodes), by the report of `TreeOps.take`; waits for the drafter."""
        self.scores = []
        found, chains, *scored = report.wait().tolist()
        counts = [int(count) for count in found]
        if scored:
            within, *by_node = scored
            scores = zip(*by_node, strict=True)
            self.scores = [list(known[1 : int(count)]) for known, count in zip(scores, within, strict=True)]
        self.has_broken |= 0 in counts
        width = max(1, *counts)
        tokens, parents, num_nodes, depth, probs, *_ = taken
        if width < tokens.shape[1]:
            tokens, parents = tokens[:, :width], parents[:, :width]
        tree = DraftTree(tokens, parents, num_nodes, min(depth, width - 1), probs, all(chains))
        return tree, [max(1, count) for count in counts]

    def _take_probs(self, slots: Tensor) -> Tensor | None:
        if self._probs is None:
            return None
        (known, probs), self._probs = self._probs, None
        places = torch.full_like(self._parts.num_nodes, NONE).index_copy_(
            0, known, torch.arange(len(known)).to(slots.device)
        )
        place = places.index_select(0, slots)
        return probs.index_select(0, place.clamp(min=0)) * (place >= 0)[:, None, None]


def limited(tree: DraftTree, limits: Sequence[DraftLimit]) -> DraftTree:
    """A drafter's trees without levels beyond the limits of their requests."""
    steps = [limit.num_steps for limit in limits]
    if not steps or min(steps) >= tree.max_depth:
        return tree
    return limit_depth(tree, torch.tensor(steps).to(tree.tokens.device, non_blocking=True))
