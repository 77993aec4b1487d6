"""EAGLE-1, EAGLE-2 and EAGLE-3: a small head over the target's hidden states drafts a dynamic tree.

After every step the head first processes the tokens that the target committed (draft extend: the hidden states of token
i with token i + 1). Then a tree grows on its outputs. Its KV of position i lies in the same KV slot as the target's, so
blocks are shared, cached and freed together. The drafter records which KV slots it has written and attends only to
those, so it can join running requests and can miss a step.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.eagle import EagleHead
from specray.models.eagle_loading import load_eagle_head
from specray.ops.attention import AttentionBatch, PaddedAttention
from specray.spec_decode.draft_setup import attention_without_graphs, head_attention, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import PaddedCommit, TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.fused_growth import FusedTreeGrower
from specray.spec_decode.padded_input import extend_input
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_config import configured_shape
from specray.spec_decode.tree_growth import PaddedPrefix, TreePrefix
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.written_slots import WrittenSlots


def make_eagle3(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    return _make(config, target, version=3)


def make_eagle2(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    """EAGLE-1 and EAGLE-2 heads, which differ only in training."""
    return _make(config, target, version=2)


class EagleDrafter:
    """Drafter over an EAGLE-2 or EAGLE-3 head, not sharded."""

    reads_next_token = True

    def __init__(self, head: EagleHead, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        self._shape = shape
        scratch = scratch_slots(target, shape.topk * (shape.num_steps - 1))
        self._padding_slot = target.num_slots + scratch.numel()  # where padding writes
        self._attention = head_attention(head, self._padding_slot + 1, target)
        self.reason_without_graphs = attention_without_graphs(self._attention) or head.reason_without_graphs
        self._run_head = head.step_forward(self._attention)
        self._extends_in_kernels = head.network is not None and self._run_head == head.network.extend
        last_position = target.context_length - 1
        self._grower = FusedTreeGrower(head, shape, self._attention, scratch, last_position, target.device, head.window)
        self._fused = self._grower.fused
        self._written = WrittenSlots(target.num_slots)
        self._inference = torch.inference_mode()

    def propose(self, context: ProposeContext) -> DraftTree:
        with self._inference:
            return self._propose(context)

    @torch.inference_mode()
    def propose_padded(self, table: RequestTable, commit: PaddedCommit, is_sampled: bool) -> DraftTree:
        """See PaddedDrafter. For requests of which this drafter has written all KV. Ignores draft limits."""
        width = min(commit.nodes.shape[1], self._shape.num_steps + 1)  # the longest path of a tree
        window = self._head.window
        read = extend_input(table, commit.slots, commit.num_kept, commit.nodes, width, self._padding_slot, window)
        assert isinstance(self._attention, PaddedAttention)
        states = self._head.fuse(commit.aux_hidden_states.index_select(0, read.nodes))
        attend = self._attention.plan_padded(read.attention)
        output = self._head(read.token_ids, states, read.positions, attend).index_select(0, read.last)
        # A child of the root counts as `end`: see `propose`.
        prefix = PaddedPrefix(commit.slots, read.ends, read.roots, read.ends)
        return self._grower.grow_padded(table, prefix, output, is_sampled)

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
        slots, _, ends = context.bounds
        visible = self._written.visible(context.table, slots, requests)
        output = self._extend(context, requests, visible)
        count = len(context.requests)
        if not count:
            return DraftTree.from_lists([], context.table.device)
        # The pair of token i + 1 and hidden state i has position i: a child of the root, at `end` + 1, counts as `end`.
        kv_slots, kv_lens = visible
        prefix = TreePrefix(context.requests, slots[:count], ends[:count], [(kv_slots[:count], kv_lens[:count])])
        return self._grower.grow(context, prefix, output[:count])

    def _extend(
        self, context: ProposeContext, requests: list[DraftRequest], visible: tuple[Tensor, list[int]]
    ) -> Tensor:
        """Draft extend; returns the head's output [requests, H] at their last positions, undefined if unfinished."""
        table, (kv_slots, kv_lens) = context.table, visible
        slots, starts, ends = context.bounds
        lengths = [request.end - request.start for request in requests]
        token_ids, positions, slot_mapping, last = table.ops.extend_input(slots, starts, ends, sum(lengths))
        sizes = [(0, 0)] * len(requests)
        batch = AttentionBatch(lengths, kv_lens, kv_slots, slot_mapping, sizes, window=self._head.window)
        assert context.aux_hidden_states is not None
        states = self._head.fuse(context.aux_hidden_states)
        attend, network = self._attention.plan(batch), self._head.network
        if self._extends_in_kernels and network is not None:
            read_lens = [1] * len(context.requests) + [0] * len(context.unfinished)
            output = network.extend(token_ids, states, positions, attend, read_lens)
        else:
            output = self._run_head(token_ids, states, positions, attend)
        return output.index_select(0, last)


def _make(config: SpeculativeConfig, target: TargetView, version: Literal[2, 3]) -> EagleDrafter:
    shape = configured_shape(config, target.architecture)
    head = load_eagle_head(config, target_matrices(config, target), version, configured_token_map(config, target))
    return EagleDrafter(head, shape, target)
