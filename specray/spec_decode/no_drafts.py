"""Plain decoding, and ranks that receive their trees from rank 0: every tree is its root."""

from collections.abc import Sequence

from torch import Tensor

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DrafterUse, DraftFault, DraftLimit


class NoDrafts:
    """DraftSource without a drafter. On ranks above 0, the sizes are those of rank 0's drafter."""

    def __init__(self) -> None:
        self.max_draft_tokens = 0
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.reads_next_token = False
        self.seconds = 0.0
        self.scores: list[list[float]] = []

    def submit(self, context: ProposeContext) -> None:
        """There is nothing to draft with."""

    def collect(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:  # noqa: ARG002
        return DraftTree.roots(roots), [1] * len(roots)

    def release(self, slots: Sequence[int]) -> None:
        """There is no state."""

    def take_faults(self) -> list[DraftFault]:
        return []

    def take_uses(self) -> Sequence[DrafterUse]:
        return ()
