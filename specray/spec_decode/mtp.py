"""MTP: drafts of the multi-token prediction layers of a target's checkpoint.

A single layer drafts like an EAGLE head, step after step on its own output (`eagle`). With several layers, step k uses
layer k, and every layer processes the whole text. Each layer keeps its KV in the same KV slots as the target, and its
outputs in a second pool: the input of a layer at a position is the output of the layer before it at the previous
position, which may come from an earlier step or from another request with the same prefix. The second pool stores
layers * hidden values per token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.eagle_loading import check_head_files
from specray.models.files import resolve_draft
from specray.models.mtp import MtpHead, MtpStack, check_mtp_files, holds_mtp_layers, load_mtp_layers
from specray.ops.attention import AttentionBatch, PaddedAttention, make_zeros
from specray.ops.ragged_index import RaggedIndex
from specray.spec_decode.draft_setup import attention_without_graphs, head_attention, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, PaddedCommit, TargetFiles, TargetView
from specray.spec_decode.eagle import EagleDrafter, make_eagle2
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.fused_growth import FusedTreeGrower
from specray.spec_decode.padded_input import extend_input
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_config import configured_shape
from specray.spec_decode.tree_growth import PaddedPrefix, TreePrefix, without_first
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.written_slots import WrittenSlots


def make_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """The MTP layers at `draft_model_path`, or else those of the target's own checkpoint."""
    layers = load_mtp_layers(*_place(config, target), target_matrices(config, target))
    token_map = configured_token_map(config, target)
    if len(layers.layers) == 1:
        return EagleDrafter(MtpHead(layers, token_map), configured_shape(config, target.architecture), target)
    shape = stack_shape(config, target.architecture, len(layers.layers))
    return StackDrafter(MtpStack(layers, shape.num_steps, token_map), shape, target)


def make_eagle_or_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """SGLang's EAGLE, also named NEXTN: an EAGLE head or MTP layers, whichever the checkpoint has."""
    if holds_mtp_layers(*_place(config, target)):
        return make_mtp(config, target)
    _require_head(config, target.folder)
    return make_eagle2(config, target)


def check_mtp(config: SpeculativeConfig, target: TargetFiles) -> None:
    check_mtp_files(*_place(config, target), target.shape)


def check_eagle_or_mtp(config: SpeculativeConfig, target: TargetFiles) -> None:
    """See `make_eagle_or_mtp`."""
    if holds_mtp_layers(*_place(config, target)):
        check_mtp(config, target)
        return
    _require_head(config, target.folder)
    check_head_files(config, target.shape, version=2)


def stack_shape(config: SpeculativeConfig, architecture: str, num_layers: int) -> TreeShape:
    """The tree of several layers, one step each. ConfigError for more steps than layers; automatic ones are reduced."""
    shape = configured_shape(config, architecture)
    if shape.num_steps <= num_layers:
        return shape
    if config.num_steps is None:
        most = TreeShape(num_layers, shape.topk, 0).pool_size + 1
        nodes = num_layers + 1 if shape.topk == 1 else min(shape.num_draft_tokens, most)
        return TreeShape(num_layers, shape.topk, nodes)
    raise ConfigError(
        f"speculative.num_steps={shape.num_steps} is more than the checkpoint's {num_layers} MTP layers, each of which "
        f"drafts one step; set num_steps <= {num_layers}"
    )


class StackDrafter:
    """Drafter over several MTP layers, not sharded."""

    reads_next_token = True

    def __init__(self, stack: MtpStack, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = stack.aux_hidden_state_layers
        self._stack = stack
        scratch = scratch_slots(target, shape.topk * (shape.num_steps - 1))
        count = stack.num_layers
        self._written = [WrittenSlots(target.num_slots) for _ in range(count)]
        # The last row of both pools takes what padding writes.
        self._num_slots, self._num_steps = target.num_slots, shape.num_steps
        self._outputs = make_zeros((count, target.num_slots + 1, stack.hidden_size), stack.dtype, target.device)
        self._padding_slot = target.num_slots + scratch.numel()
        self._attention = head_attention(stack, self._padding_slot + 1, target)
        self.reason_without_graphs = attention_without_graphs(self._attention) or stack.reason_without_graphs
        self._grower = FusedTreeGrower(stack, shape, self._attention, scratch, target.context_length - 1, target.device)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        for written in self._written:
            written.forget(context.unread_kv_slots)
        requests = context.requests + context.unfinished
        if not requests:
            return DraftTree.from_lists([], context.table.device)
        if context.replay is not None and self._continues(context):
            return context.replay()
        self._extend(context, requests)
        if not context.requests:
            return DraftTree.from_lists([], context.table.device)
        slots, ends = context.columns(context.requests, "slot", "end")
        visible = [written.visible(context.table, slots, context.requests) for written in self._written]
        prefix = TreePrefix(context.requests, slots, ends, visible)
        return self._grower.grow(context, prefix, self._last_outputs(context, slots, ends))

    @torch.inference_mode()
    def propose_padded(self, table: RequestTable, commit: PaddedCommit, is_sampled: bool) -> DraftTree:
        """See PaddedDrafter. For requests whose positions every layer has read as far as it can. Ignores draft limits.

        Layer k has no input at the first k positions, so it never has KV there.
        """
        slots, width = commit.slots, min(commit.nodes.shape[1], self._num_steps + 1)
        read = extend_input(table, slots, commit.num_kept, commit.nodes, width, self._padding_slot)
        rows, written = read.attention.rows, read.attention.slot_mapping.clamp(max=self._num_slots)
        before = table.kv_slots_at(rows, (read.positions - 1).clamp(min=0))
        states = self._stack.fuse(commit.aux_hidden_states.index_select(0, read.nodes))
        assert isinstance(self._attention, PaddedAttention)
        for layer in range(self._stack.num_layers):
            if layer:
                states = self._outputs[layer - 1].index_select(0, before)
            attend = self._attention.plan_padded(without_first(read.attention, layer))
            output = self._stack.read(layer, read.token_ids, states, read.positions, attend)
            self._outputs[layer].index_copy_(0, written, output)
        last = self._outputs.index_select(1, table.kv_slots_at(slots, (read.ends - 1).clamp(min=0)))
        prefix = PaddedPrefix(slots, read.ends, read.roots, read.ends, skipped=range(self._stack.num_layers))
        return self._grower.grow_padded(table, prefix, last.transpose(0, 1), is_sampled)

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        for written in self._written:
            written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:
        """The only state is KV in the requests' blocks."""

    def _continues(self, context: ProposeContext) -> bool:
        """Record that all layers read the step's tokens; whether they then have read all that they can.

        If they have not, `_extend` records what each layer reads.
        """
        starts = [request.start for request in context.requests]
        for written in self._written:
            written.update(context.table, context.requests, starts)
        return min(starts) >= self._stack.num_layers and all(
            written.are_all(context.table, context.requests, first) for first, written in enumerate(self._written)
        )

    def _extend(self, context: ProposeContext, requests: list[DraftRequest]) -> None:
        """Draft extend in every layer."""
        assert context.aux_hidden_states is not None
        starts, states = [request.start for request in requests], self._stack.fuse(context.aux_hidden_states)
        for layer in range(self._stack.num_layers):
            if layer:
                starts = self._starts(context, requests, layer, starts)
            self._written[layer].update(context.table, requests, starts)
            spans = [place for place, request in enumerate(requests) if starts[place] < request.end]
            if spans:
                rows = [requests[place]._replace(start=starts[place]) for place in spans]
                self._read(context, layer, rows, None if layer else states)

    def _starts(
        self, context: ProposeContext, requests: list[DraftRequest], layer: int, starts: list[int]
    ) -> list[int]:
        """The first positions that `layer` can compute if the layer before it began at `starts` in this step."""
        has_input = self._written[layer - 1].has(context.table, requests, [max(start - 1, 0) for start in starts])
        rows = zip(requests, starts, has_input.tolist(), strict=True)
        return [min(start if start > 0 and known else start + 1, request.end) for request, start, known in rows]

    def _read(self, context: ProposeContext, layer: int, requests: list[DraftRequest], states: Tensor | None) -> None:
        """One layer over positions `start` … `end - 1`; `states` None: the outputs of the layer before."""
        table = context.table
        slots, starts, ends = context.columns(requests, "slot", "start", "end")
        lengths = [request.end - request.start for request in requests]
        index = RaggedIndex.of(ends - starts, sum(lengths))
        rows, positions = slots.index_select(0, index.rows), starts.index_select(0, index.rows) + index.offsets
        written = table.kv_slots_at(rows, positions)
        if states is None:
            states = self._outputs[layer - 1].index_select(0, table.kv_slots_at(rows, positions - 1))
        kv_slots, kv_lens = self._written[layer].visible(table, slots, requests)
        batch = AttentionBatch(lengths, kv_lens, kv_slots, written, tree_sizes=[(0, 0)] * len(requests))
        attend = self._attention.plan(batch)
        output = self._stack.read(layer, table.tokens_at(rows, positions + 1), states, positions, attend)
        self._outputs[layer].index_copy_(0, written, output)

    def _last_outputs(self, context: ProposeContext, slots: Tensor, ends: Tensor) -> Tensor:
        """[B, layers, H] at the last computed tokens; zeros where a prompt is too short for a layer."""
        kv_slots = context.table.kv_slots_at(slots, ends - 1)
        outputs = self._outputs.index_select(1, kv_slots).transpose(0, 1)
        last = [request.end - 1 for request in context.requests]
        known = np.stack([written.has(context.table, context.requests, last) for written in self._written], 1)
        return outputs.masked_fill(~torch.from_numpy(known).to(outputs.device)[:, :, None], 0.0)


def _require_head(config: SpeculativeConfig, target_folder: Path) -> None:
    if config.draft_model_path is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm}, but speculative.draft_model_path is null and the target in "
            f"{target_folder} has no MTP layers of its own; set draft_model_path to a head's folder or hub name"
        )


def _place(config: SpeculativeConfig, target: TargetView | TargetFiles) -> tuple[Path, str]:
    """(folder, load format) of the drafting layers."""
    if config.draft_model_path is None:
        return target.folder, target.load_format
    return resolve_draft(config, progress=False), config.draft_load_format
