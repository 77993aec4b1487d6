"""Drafting in the target's own process."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import (
    Drafter,
    DraftFaultError,
    DraftReport,
    EarlyStep,
    TreeRows,
    UnsizedTrees,
    composite_of,
)
from specray.spec_decode.pending_trees import PendingTrees, limited
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DraftFault, DraftLimit


class InlineDrafts:
    """DraftSource in the target's process and thread."""

    reads_context = True
    waits_on_device = False

    def __init__(self, drafter: Drafter, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.drafter = drafter
        self._pending = PendingTrees(num_slots, vocab_size, device)
        self._faults: list[DraftFault] = []
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.seconds = 0.0
        self._several = composite_of(drafter)

    @property
    def scores(self) -> list[list[float]]:
        return self._pending.scores

    def submit(self, context: ProposeContext) -> None:
        start = time.perf_counter()
        try:
            tree = self.drafter.propose(context)
        except DraftFaultError as fault:
            self._faults.append(fault.kind)
            return
        if context.requests and not context.are_drafts_taken:
            self._pending.put(context.bounds[0][: len(context.requests)], limited(tree, context.draft_limits))
        self.seconds = time.perf_counter() - start

    def draft_early(self, step: EarlyStep) -> None:
        """A graph of the target drafts, or `submit`."""

    def collect(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
        return self._pending.take(rows.slots, rows.roots, draft_limits).wait_for_sizes()

    def take_unsized(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> UnsizedTrees:
        return self._pending.take(slots, roots, draft_limits)

    def take_next(
        self, tree: DraftTree, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]
    ) -> UnsizedTrees:
        self._pending.put(slots, tree)
        taken, width = self.take_unsized(slots, roots, draft_limits), tree.tokens.shape[1]
        return taken._replace(most_nodes=[min(count, width) for count in taken.most_nodes])

    def release(self, slots: Sequence[int]) -> None:
        self._pending.drop(slots)
        self.drafter.release(slots)

    def take_report(self) -> DraftReport:
        if self._pending.has_broken:
            self._faults.append(DraftFault.NOT_A_NUMBER)
        faults, self._faults, self._pending.has_broken = self._faults, [], False
        return DraftReport(faults, () if self._several is None else self._several.take_uses())
