"""MTP: drafts of the multi-token prediction layers of a target's checkpoint.

A single layer drafts like an EAGLE head, step after step on its own output (`eagle`). With several layers, step k uses
layer k, and every layer processes the whole text. Each layer keeps its KV in the same KV slots as the target, and its
outputs in a second pool: the input of a layer at a position is the output of the layer before it at the previous
position, which may come from an earlier step or from another request with the same prefix. The second pool stores
layers * hidden values per token.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft
from specray.models.heads.loading import check_head_files
from specray.models.heads.mtp import MtpHead, MtpStack, check_mtp_files, holds_mtp_layers, load_mtp_layers
from specray.ops.attention import make_zeros
from specray.spec_decode.draft_rows import DraftRows
from specray.spec_decode.draft_setup import attention_without_graphs, head_kv, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, TargetFiles, TargetView
from specray.spec_decode.eagle import EagleDrafter, make_eagle
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.scheduled_rows import Reads, ScheduledRows
from specray.spec_decode.tree_growth import TreeGrower
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape
from specray.spec_decode.written_slots import WrittenSlots


def make_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """The MTP layers or the assistant at `draft_model_path`, or else the MTP layers of the target's own checkpoint."""
    if _has_assistant(config):
        from specray.spec_decode.frozen_kv import make_frozen_kv

        return make_frozen_kv(config, target)
    layers = load_mtp_layers(*_place(config, target), target_matrices(config, target))
    token_map = configured_token_map(config, target)
    if len(layers.layers) == 1:
        return EagleDrafter(MtpHead(layers, token_map), configured_shape(config, target.architecture), target)
    shape = stack_shape(config, target.architecture, len(layers.layers))
    return StackDrafter(MtpStack(layers, shape.num_steps, token_map), shape, target)


def make_eagle_or_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """SGLang's EAGLE, also named NEXTN: an EAGLE head, MTP layers or an assistant, whichever the checkpoint has."""
    if _has_assistant(config) or holds_mtp_layers(*_place(config, target)):
        return make_mtp(config, target)
    _require_head(config, target.folder)
    return make_eagle(config, target, version=2)


def check_mtp(config: SpeculativeConfig, target: TargetFiles) -> None:
    if _has_assistant(config):
        from specray.spec_decode.frozen_kv import check_frozen_kv

        check_frozen_kv(config, target)
    else:
        check_mtp_files(*_place(config, target), target.shape)


def check_eagle_or_mtp(config: SpeculativeConfig, target: TargetFiles) -> None:
    """See `make_eagle_or_mtp`."""
    if _has_assistant(config) or holds_mtp_layers(*_place(config, target)):
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
    """Drafter over several MTP layers."""

    reads_next_token = True

    def __init__(self, stack: MtpStack, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = stack.aux_hidden_state_layers
        self._stack = stack
        count = stack.num_layers
        self._kv = head_kv(stack, shape, target, num_layers=count)
        self.reason_without_graphs = attention_without_graphs(self._kv.attention) or stack.reason_without_graphs
        self._grower = TreeGrower(stack, self._kv, target.device)
        self._written = [WrittenSlots(target.num_slots) for _ in range(count)]
        # By the target's KV slots; the last row takes what padding writes.
        self._outputs = make_zeros((count, target.num_slots + 1, stack.hidden_size), stack.dtype, target.device)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        for written in self._written:
            written.forget(context.missed_kv_slots)
        requests = context.requests + context.unfinished
        if not requests:
            return DraftTree.from_lists([], context.table.device)
        if context.replay is not None and self._continues(context):
            return context.replay()
        reads = self._reads(context, requests)
        slots, _, ends = (column[: len(context.requests)] for column in context.bounds)
        prefixes = []
        if context.requests:
            prefixes = [written.visible(context.table, slots, context.requests) for written in self._written]
            self._clear_unknown(context, slots, ends)
        return self.draft(ScheduledRows(context, context.requests, reads, prefixes))

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: draft extend in every layer, then trees on all layers' outputs at the last positions."""
        for layer in range(self._stack.num_layers):
            if (read := rows.read(self._kv, layer)) is None:
                continue
            if layer:
                states = self._outputs[layer - 1].index_select(0, read.before())
            else:
                states = self._stack.fuse(rows.aux_hidden_states())
            output = self._stack.read(layer, read.token_ids, states, read.positions, read.attend)
            self._outputs[layer].index_copy_(0, read.written.clamp(max=self._outputs.shape[1] - 1), output)
        if not rows.count:
            return DraftTree.from_lists([], self._outputs.device)
        last = self._outputs.index_select(1, rows.kv_slots_at((rows.ends - 1).clamp(min=0)))
        return self._grower.grow(rows, last.transpose(0, 1), rows.ends)

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        for written in self._written:
            written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:
        """The only state is KV in the requests' blocks."""

    def _continues(self, context: ProposeContext) -> bool:
        """Record that all layers read the step's tokens; whether they then have read all that they can.

        If they have not, `_reads` records what each layer reads.
        """
        starts = [request.start for request in context.requests]
        for written in self._written:
            written.update(context.table, context.requests, starts)
        return min(starts) >= self._stack.num_layers and all(
            written.are_all(context.table, context.requests, first) for first, written in enumerate(self._written)
        )

    def _reads(self, context: ProposeContext, requests: list[DraftRequest]) -> list[Reads]:
        """What each layer reads, which is recorded."""
        starts, reads = [request.start for request in requests], []
        for layer, written in enumerate(self._written):
            if layer:
                starts = self._starts(context, requests, layer, starts)
            written.update(context.table, requests, starts)
            pairs = zip(requests, starts, strict=True)
            read = [request._replace(start=start) for request, start in pairs if start < request.end]
            bounds = context.bounds_of(read) if layer else context.bounds
            visible = written.visible(context.table, bounds[0], read) if read else (bounds[0], [])
            reads.append(Reads(read, bounds, *visible))
        return reads

    def _starts(
        self, context: ProposeContext, requests: list[DraftRequest], layer: int, starts: list[int]
    ) -> list[int]:
        """The first positions that `layer` can compute if the layer before it began at `starts` in this step."""
        has_input = self._written[layer - 1].has(context.table, requests, [max(start - 1, 0) for start in starts])
        rows = zip(requests, starts, has_input.tolist(), strict=True)
        return [min(start if start > 0 and known else start + 1, request.end) for request, start, known in rows]

    def _clear_unknown(self, context: ProposeContext, slots: Tensor, ends: Tensor) -> None:
        """Zero the outputs at the last computed tokens of prompts that are too short for a layer."""
        last = [request.end - 1 for request in context.requests]
        unknown = ~np.stack([written.has(context.table, context.requests, last) for written in self._written])
        if unknown.any():
            layers, rows = (torch.from_numpy(part).to(slots.device) for part in unknown.nonzero())
            kv_slots = context.table.kv_slots_at(slots, ends - 1)
            self._outputs[layers, kv_slots.index_select(0, rows)] = 0.0


def _require_head(config: SpeculativeConfig, target_folder: Path) -> None:
    if config.draft_model_path is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm}, but speculative.draft_model_path is null and the target in "
            f"{target_folder} has no MTP layers of its own; set draft_model_path to a head's folder or hub name"
        )


def _has_assistant(config: SpeculativeConfig) -> bool:
    """Whether `draft_model_path` is an assistant of Gemma 4, which others call MTP, too."""
    if config.draft_model_path is None:
        return False
    try:
        content = json.loads((resolve_draft(config, progress=False) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the methods that the checkpoint may be for describe the problem
        return False
    kind = content.get("model_type") if isinstance(content, dict) else None
    return kind in ("gemma4_assistant", "gemma4_unified_assistant")


def _place(config: SpeculativeConfig, target: TargetView | TargetFiles) -> tuple[Path, str]:
    """(folder, load format) of the drafting layers."""
    if config.draft_model_path is None:
        return target.folder, target.load_format
    return resolve_draft(config, progress=False), config.draft_load_format
