"""EAGLE-1, EAGLE-2 and EAGLE-3: a small head over the target's hidden states drafts a dynamic tree.

After every step the head first processes the tokens that the target committed (draft extend: the hidden states of token
i with token i + 1). Then a tree grows on its outputs. Its KV of position i lies in the same KV slot as the target's, so
blocks are shared, cached and freed together. The drafter records which KV slots it has written and attends only to
those, so it can join running requests and can miss a step.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from specray.config import SpeculativeConfig
from specray.models.heads.loading import load_eagle_head
from specray.models.heads.served import EagleHead
from specray.spec_decode.draft_rows import DraftRows, Reads, ScheduledRows
from specray.spec_decode.draft_setup import attention_without_graphs, head_kv, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_growth import TreeGrower
from specray.spec_decode.tree_shape import TreeShape, configured_shape
from specray.spec_decode.written_slots import WrittenSlots


def make_eagle3(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    return _make(config, target, version=3)


def make_eagle2(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    """EAGLE-1 and EAGLE-2 heads, which differ only in training."""
    return _make(config, target, version=2)


class EagleDrafter:
    """Drafter over an EAGLE-2 or EAGLE-3 head."""

    reads_next_token = True

    def __init__(self, head: EagleHead, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        self._kv = head_kv(head, shape, target)
        self.reason_without_graphs = attention_without_graphs(self._kv.attention) or head.reason_without_graphs
        self._run_head = head.step_forward(self._kv.attention)
        self._extends_in_kernels = head.network is not None and self._run_head == head.network.extend
        self._grower = TreeGrower(head, self._kv, target.device)
        self._fused = self._grower.fused
        self._written = WrittenSlots(target.num_slots)
        self._inference = torch.inference_mode()

    def propose(self, context: ProposeContext) -> DraftTree:
        with self._inference:
            return self._propose(context)

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: draft extend, then trees on the head's outputs at the last committed tokens."""
        read = rows.read(self._kv)
        assert read is not None
        states = self._head.fuse(rows.aux_hidden_states())
        if self._extends_in_kernels and self._head.network is not None:
            inputs = (read.token_ids, states, read.positions, read.attend)
            output = self._head.network.extend(*inputs, read.read_lens)
        else:
            output = self._run_head(read.token_ids, states, read.positions, read.attend)
        if not rows.count:
            return DraftTree.from_lists([], output.device)
        # The pair of token i + 1 and hidden state i has position i: a child of the root, at `end` + 1, counts as `end`.
        return self._grower.grow(rows, output.index_select(0, read.last[:, 0]), rows.ends)

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        self._written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:
        """The only state is KV in the requests' blocks."""

    def _propose(self, context: ProposeContext) -> DraftTree:
        self._written.read(context)
        requests = context.requests + context.unfinished
        if not requests:
            return DraftTree.from_lists([], context.table.device)
        if context.replay is not None and self._written.are_all(context.table, requests):
            return context.replay()
        if self._extends_in_kernels and self._written.are_all(context.table, requests):
            tree = self._fused.extend_and_grow(context, self._head.fuse)
            if tree is not None:
                return tree
        visible = self._written.visible(context.table, context.bounds[0], requests)
        reads = Reads(requests, context.bounds, *visible)
        return self.draft(ScheduledRows(context, context.requests, [reads]))


def _make(config: SpeculativeConfig, target: TargetView, version: Literal[2, 3]) -> EagleDrafter:
    shape = configured_shape(config, target.architecture)
    head = load_eagle_head(config, target_matrices(config, target), version, configured_token_map(config, target))
    return EagleDrafter(head, shape, target)
