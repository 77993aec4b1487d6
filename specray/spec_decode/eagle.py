"""EAGLE-1, EAGLE-2 and EAGLE-3: a small head over the target's hidden states drafts a dynamic tree.

After every step the head first processes the tokens that the target committed (draft extend: the hidden states of token
i with token i + 1). Then a tree grows on its outputs.
"""

from typing import Literal

import torch

from specray.config import SpeculativeConfig
from specray.models.heads.loading import load_eagle_head
from specray.models.heads.served import EagleHead
from specray.spec_decode.draft_rows import DraftRows
from specray.spec_decode.draft_setup import head_kv, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.head_drafter import HeadDrafter
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_growth import TreeGrower
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape


def make_eagle(config: SpeculativeConfig, target: TargetView, version: Literal[2, 3]) -> "EagleDrafter":
    """EAGLE-1 heads have version 2: they differ from EAGLE-2 only in training."""
    shape = configured_shape(config, target.architecture)
    head = load_eagle_head(config, target_matrices(config, target), version, configured_token_map(config, target))
    return EagleDrafter(head, shape, target)


class EagleDrafter(HeadDrafter):
    """Drafter over an EAGLE-2 or EAGLE-3 head."""

    def __init__(self, head: EagleHead, shape: TreeShape, target: TargetView) -> None:
        super().__init__(head, head_kv(head, shape, target), target)
        self._head = head
        self._network = head.extending_network(self._kv.attention)
        self._grower = TreeGrower(head, self._kv, target.device)
        self._fused = self._grower.fused

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: draft extend, then trees on the head's outputs at the last committed tokens."""
        read = rows.read(self._kv)
        assert read is not None
        inputs = read.token_ids, self._head.fuse(rows.aux_hidden_states()), read.positions, read.attend
        output = self._network.extend(*inputs, read.read_lens) if self._network else self._head(*inputs)
        if not rows.count:
            return DraftTree.from_lists([], output.device)
        # The pair of token i + 1 and hidden state i has position i: a child of the root, at `end` + 1, counts as `end`.
        return self._grower.grow(rows, output.index_select(0, read.last[:, 0]), rows.ends)

    def _in_one_call(self, context: ProposeContext) -> DraftTree | None:
        return self._fused.extend_and_grow(context, self._head.fuse) if self._network else None
