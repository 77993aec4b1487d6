"""Draft trees that wait for the next step."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.cpu import steps as cpu_steps
from specray.ops.cpu.library import kernels_on
from specray.ops.gpu import uses_triton
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.step import DraftLimit


class PendingTrees:
    """Trees that wait for the next step, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._tokens, self._parents = torch.full((2, num_slots, 1), NONE, dtype=torch.int64, device=device)
        self._num_nodes = torch.full((num_slots,), NONE, dtype=torch.int64, device=device)  # NONE: no tree is pending
        self._max_depth = 0
        self._probs: tuple[Tensor, Tensor] | None = None  # (slots, DraftTree.draft_probs) of the last trees
        self._scores: Tensor | None = None  # float32 like `_tokens`, DraftTree.scores; None: never known
        self.scores: list[list[float]] = []  # see `DraftSource.scores`
        self._uses_triton = uses_triton(device)
        self._kernels = kernels_on(device)

    def put(self, slots: Tensor, tree: DraftTree) -> None:
        """Keep the trees of `slots` int64 [B]; they replace older ones."""
        width = tree.tokens.shape[1]
        if (missing := width - self._tokens.shape[1]) > 0:
            parts = (self._tokens, self._parents)
            self._tokens, self._parents = (F.pad(part, (0, missing), value=NONE) for part in parts)
            self._scores = None if self._scores is None else F.pad(self._scores, (0, missing))
        if tree.scores is not None and self._scores is None:
            self._scores = torch.ones_like(self._tokens, dtype=torch.float32)
        if self._uses_triton:
            from specray.ops.gpu import steps

            steps.put(self._parts, slots, (tree.tokens, tree.parents, tree.num_nodes, tree.scores))
        elif self._kernels is not None:
            trees = (tree.tokens, tree.parents, tree.num_nodes, tree.scores)
            cpu_steps.put(self._kernels, self._parts, slots, trees)
        else:
            self._put(slots, tree, width)
        self._max_depth = max(self._max_depth, tree.max_depth)
        self._probs = None if tree.draft_probs is None else (slots, tree.draft_probs)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the trees of these slots."""
        if slots and self._max_depth:
            self._num_nodes[torch.tensor(slots, device=self._num_nodes.device)] = NONE

    def take(
        self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]
    ) -> tuple[DraftTree, list[int], bool]:
        """(trees, their numbers of nodes on the host, whether a drafter's logits were not finite).

        Arguments and trees are those of `DraftSource.collect`. Taking a tree removes it.
        """
        self.scores = []
        if not self._max_depth:
            return DraftTree.roots(roots), [1] * len(roots), False
        cuts = self._scores is not None and any(limit.min_score for limit in draft_limits)
        limits: list[list[float]] = [[limit.num_tokens + 1 for limit in draft_limits]]
        if cuts:
            limits.append([limit.min_score for limit in draft_limits])
        bounds = torch.tensor(limits).to(slots.device)
        most, least = bounds[0], bounds[1] if cuts else None
        if self._uses_triton:
            from specray.ops.gpu import steps

            taken = steps.take(self._parts, slots, roots, most, least, self._vocab_size)
        elif self._kernels is not None:
            taken = cpu_steps.take(self._kernels, self._parts, slots, roots, most, least, self._vocab_size)
        else:
            taken = self._take(slots, roots, most, least)
        tokens, parents, num_nodes, report = taken
        # Drafting's one copy to the host. It waits for the drafter and determines the shapes of the next forward.
        found, chains, *scored = report.tolist()
        counts = [int(count) for count in found]
        if scored:
            within, *by_node = scored
            scores = zip(*by_node, strict=True)
            self.scores = [list(known[1 : int(count)]) for known, count in zip(scores, within, strict=True)]
        width = max(1, *counts)
        probs, depth = self._take_probs(slots), min(self._max_depth, width - 1)
        tree = DraftTree(tokens[:, :width], parents[:, :width], num_nodes, depth, probs, all(chains))
        return tree, [max(1, count) for count in counts], 0 in counts

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self._tokens, self._parents, self._num_nodes, self._scores

    def _put(self, slots: Tensor, tree: DraftTree, width: int) -> None:
        self._tokens[:, :width].index_copy_(0, slots, tree.tokens)
        self._parents[:, :width].index_copy_(0, slots, tree.parents)
        self._num_nodes.index_copy_(0, slots, tree.num_nodes)
        if tree.scores is not None and self._scores is not None:
            self._scores[:, :width].index_copy_(0, slots, tree.scores)
        elif self._scores is not None:
            self._scores.index_fill_(0, slots, 1.0)

    def _take(
        self, slots: Tensor, roots: Tensor, most: Tensor, least: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens and parents [B, W], numbers of nodes [B], report [2, B]): see `specray.ops.gpu.steps.take`.

        `most` [B] are the nodes that each tree may have. The report has the numbers of nodes, 0 if the drafter's logits
        were not finite, and which trees are chains. With `least` float32 [B], nodes of a lower score are cut, and the
        report is float32 [3 + W, B]: also the numbers of nodes before that, and the nodes' scores.
        """
        tokens, parents = (part.index_select(0, slots) for part in (self._tokens, self._parents))
        found = self._num_nodes.index_select(0, slots)
        self._num_nodes.index_fill_(0, slots, NONE)
        tree = DraftTree(tokens, parents, found, self._max_depth)
        is_usable = (found > 0) & (tokens[:, ROOT] == roots) & tree.is_valid(self._vocab_size)
        within = torch.where(is_usable, torch.minimum(found, most.to(found.dtype)), 1)
        nodes = torch.arange(tokens.shape[1], device=slots.device)
        num_nodes, scores = within, None
        if self._scores is not None and least is not None:
            scores = self._scores.index_select(0, slots)
            num_nodes = ((scores >= least[:, None]) & (nodes < within[:, None])).sum(-1).clamp(min=1)
        is_chain = ((parents == nodes - 1) | (nodes >= num_nodes[:, None])).all(-1)
        tokens, parents = (part.masked_fill(nodes >= num_nodes[:, None], NONE) for part in (tokens, parents))
        tokens[:, ROOT], parents[:, ROOT] = roots, NONE
        report = torch.stack((torch.where(found == 0, 0, num_nodes), is_chain))
        if scores is not None:
            report = torch.cat((report, within[None], scores.t()))
        return tokens, parents, num_nodes, report

    def _take_probs(self, slots: Tensor) -> Tensor | None:
        if self._probs is None:
            return None
        (known, probs), self._probs = self._probs, None
        places = torch.full_like(self._num_nodes, NONE).index_copy_(0, known, torch.arange(len(known)).to(slots.device))
        place = places.index_select(0, slots)
        return probs.index_select(0, place.clamp(min=0)) * (place >= 0)[:, None, None]
