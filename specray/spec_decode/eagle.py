"""EAGLE-1, -2 and -3: a small head on the target's features drafts a dynamic tree.

After every step the head first reads what the target computed for good (draft extend: feature of token i with token
i + 1), overwriting whatever it guessed there, and then a tree grows on its outputs. Its KV of position i lies in the
slot of the target's, so blocks are shared, cached and freed together; all the drafter remembers is which slots it has
written, and it reads no others: so it may start beside a target that has been running for long, and may miss a step.
Not here: the head (`specray.models.eagle`), how a tree grows (`tree_growth`), the choice of its nodes (`eagle_tree`).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.eagle import EagleHead, load_eagle_head
from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftRow, ProposeContext, TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.tree_growth import TreeGrower, TreePrefix, scratch_slots, target_matrices
from specray.spec_decode.tree_shape import TreeShape


def make_eagle3(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    return _make(config, target, version=3)


def make_eagle2(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    """EAGLE-1 and -2 heads alike: they differ in how they were trained."""
    return _make(config, target, version=2)


class EagleDrafter:
    """Drafter over an EAGLE-2 or EAGLE-3 head, whole on this rank."""

    reads_next_token = True

    def __init__(self, head: EagleHead, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        self._device = target.device
        scratch = scratch_slots(target, shape.topk * (shape.num_steps - 1))
        pool = make_pool(
            1, target.num_slots + scratch.size, head.num_kv_heads, head.head_dim, head.dtype, target.device
        )
        self._attention = make_backend(target.attention_backend, pool, head.num_heads)
        self._grower = TreeGrower(head, shape, self._attention, scratch, target.context_length - 1, target.device)
        self._is_written = np.zeros(target.num_slots, dtype=bool)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        rows = context.rows + context.unfinished
        if not rows:
            return DraftTree.of([])
        assert context.aux_hidden_states is not None
        for row in rows:  # what lies behind `end` is of another request or of rejected nodes
            self._is_written[row.kv_slots[row.start :]] = False
            self._is_written[row.kv_slots[row.start : row.end]] = True
        visible = [self._visible(row) for row in rows]
        last = self._extend(rows, visible, context.aux_hidden_states)[: len(context.rows)]
        if not context.rows:
            return DraftTree.of([])
        # The pair of token i + 1 and feature i has position i: a child of the root, at `end` + 1, counts as `end`.
        prefixes = [TreePrefix(row, slots, row.end) for row, slots in zip(context.rows, visible, strict=False)]
        return self._grower.grow(prefixes, last)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget: whatever there is lies in KV blocks, which have owners."""

    def _extend(self, rows: list[DraftRow], visible: list[np.ndarray], aux_hidden_states: Tensor) -> Tensor:
        """Read what the step computed; the head's output [rows, hidden] at each row's last position."""
        lengths = [row.end - row.start for row in rows]
        tokens = [token for row in rows for token in row.token_ids[row.start + 1 : row.end + 1]]
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        written = np.concatenate([row.kv_slots[row.start : row.end] for row in rows])
        ragged = AttentionBatch(lengths, visible, self._tensor(written), [None] * len(rows))
        states = self._head.fuse(aux_hidden_states)
        attend = self._attention.plan(ragged)
        output = self._head(torch.tensor(tokens, device=self._device), states, self._tensor(positions), attend)
        return output.index_select(0, self._tensor(np.cumsum(lengths) - 1))

    def _visible(self, row: DraftRow) -> np.ndarray:
        """KV slots of the row's positions up to `end`, without those this drafter never wrote."""
        slots = row.kv_slots[: row.end]
        visible: np.ndarray = slots[self._is_written[slots]]
        return visible

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _make(config: SpeculativeConfig, target: TargetView, version: Literal[2, 3]) -> EagleDrafter:
    shape = TreeShape.of(config, target.architecture)
    head = load_eagle_head(config, target_matrices(config, target), version, configured_token_map(config, target))
    return EagleDrafter(head, shape, target)
