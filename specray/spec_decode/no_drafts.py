"""Plain decoding, and ranks that receive their trees from rank 0: every tree is its root."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import DraftReport, EarlyStep, TreeRows, UnsizedTrees
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DraftLimit


class NoDrafts:
    """DraftSource without a drafter. On ranks above 0, the sizes are those of rank 0's drafter."""

    reads_context = False
    waits_on_device = False

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._parents = torch.full((num_slots, 1), NONE, dtype=torch.int64, device=device)
        self._num_nodes = torch.ones(num_slots, dtype=torch.int64, device=device)
        self.max_draft_tokens = 0
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.reads_next_token = False
        self.seconds = 0.0
        self.scores: list[list[float]] = []

    def submit(self, context: ProposeContext) -> None:
        """There is nothing to draft with."""

    def draft_early(self, step: EarlyStep) -> None:
        """There is nothing to draft with."""

    def take_unsized(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> None:
        """Trees are taken as a whole."""

    def take_next(
        self,
        tree: DraftTree,  # noqa: ARG002
        slots: Tensor,  # noqa: ARG002
        roots: Tensor,  # noqa: ARG002
        draft_limits: Sequence[DraftLimit],  # noqa: ARG002
    ) -> UnsizedTrees:
        raise AssertionError("no graph of the target drafts")

    def collect(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:  # noqa: ARG002
        count = rows.roots.shape[0]
        return DraftTree(rows.roots.view(-1, 1), self._parents[:count], self._num_nodes[:count], 0), [1] * count

    def release(self, slots: Sequence[int]) -> None:
        """There is no state."""

    def take_report(self) -> DraftReport:
        return DraftReport()
