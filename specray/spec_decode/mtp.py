"""MTP: layers that come with a target draft for it.

One layer drafts as an EAGLE head does, step after step on its own output (`eagle`). Several layers take a step each,
and all of them read all the text: each keeps KV of its own in the slots of the target's, and its outputs in a pool
beside, because what a layer reads at a position is what the layer before put out one position earlier, maybe in an
earlier step or for another request with the same beginning. That costs layers * hidden numbers a token more. Not here:
the layers (`specray.models.mtp`), how a tree grows (`tree_growth`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft
from specray.models.mtp import MtpHead, MtpStack, holds_mtp_layers, load_mtp_layers
from specray.ops.attention import Attend, AttentionBackend, AttentionBatch, make_pool, make_zeros
from specray.ops.backends import make_backend
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, DraftRow, ProposeContext, TargetView
from specray.spec_decode.eagle import EagleDrafter, make_eagle2
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.tree_growth import TreeGrower, TreePrefix, scratch_slots, target_matrices
from specray.spec_decode.tree_shape import TreeShape


def make_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """The MTP layers at `draft_model_path`, or else those of the target's own checkpoint."""
    layers = load_mtp_layers(*_place(config, target), target_matrices(config, target))
    token_map = configured_token_map(config, target)
    if len(layers.layers) == 1:
        return EagleDrafter(MtpHead(layers, token_map), TreeShape.of(config, target.architecture), target)
    shape = stack_shape(config, target.architecture, len(layers.layers))
    return StackDrafter(MtpStack(layers, shape.num_steps, token_map), shape, target)


def make_eagle_or_mtp(config: SpeculativeConfig, target: TargetView) -> Drafter:
    """SGLang's EAGLE, of which NEXTN is another name: what is in the checkpoint decides."""
    if holds_mtp_layers(*_place(config, target)):
        return make_mtp(config, target)
    if config.draft_model_path is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm}, but speculative.draft_model_path is null and the target in "
            f"{target.folder} has no MTP layers of its own; set draft_model_path to a head's folder or hub name"
        )
    return make_eagle2(config, target)


def stack_shape(config: SpeculativeConfig, architecture: str, num_layers: int) -> TreeShape:
    """The tree of several layers: one step each. ConfigError for more steps than layers; automatic ones are cut."""
    shape = TreeShape.of(config, architecture)
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
    """Drafter over several MTP layers, whole on this rank."""

    reads_next_token = True

    def __init__(self, stack: MtpStack, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = stack.aux_hidden_state_layers
        self._stack = stack
        self._device = target.device
        scratch = scratch_slots(target, shape.topk * (shape.num_steps - 1))
        num_slots, count = target.num_slots + scratch.size, stack.num_layers
        pool = make_pool(count, num_slots, stack.num_kv_heads, stack.head_dim, stack.dtype, target.device)
        # By layer: slots whose KV and output it has written for a committed token. Tree nodes are always seen.
        self._is_written = np.zeros((count, num_slots), dtype=bool)
        self._is_written[:, target.num_slots :] = True
        self._outputs = make_zeros((count, target.num_slots, stack.hidden_size), stack.dtype, target.device)
        backend = make_backend(target.attention_backend, pool, stack.num_heads)
        self._attention = _PerLayer(backend, self._is_written)
        self._grower = TreeGrower(stack, shape, self._attention, scratch, target.context_length - 1, target.device)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        rows = context.rows + context.unfinished
        if not rows:
            return DraftTree.of([])
        assert context.aux_hidden_states is not None
        self._extend(rows, context.aux_hidden_states)
        if not context.rows:
            return DraftTree.of([])
        prefixes = [TreePrefix(row, row.kv_slots[: row.end], row.end) for row in context.rows]
        return self._grower.grow(prefixes, self._last_outputs(context.rows))

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget: whatever there is lies in KV blocks, which have owners."""

    def _extend(self, rows: list[DraftRow], aux_hidden_states: Tensor) -> None:
        """Let every layer read what the step computed."""
        starts, states = [row.start for row in rows], self._stack.fuse(aux_hidden_states)
        for layer in range(self._stack.num_layers):
            if layer:
                starts = [self._start(row, layer, start) for row, start in zip(rows, starts, strict=True)]
                before = [row.kv_slots[start - 1 : row.end - 1] for row, start in zip(rows, starts, strict=True)]
                states = self._outputs[layer - 1].index_select(0, self._tensor(np.concatenate(before)))
            for row, start in zip(rows, starts, strict=True):  # behind `end` is what another request or a guess left
                self._is_written[layer, row.kv_slots[row.start :]] = False
                self._is_written[layer, row.kv_slots[start : row.end]] = True
            self._read(layer, rows, starts, states)

    def _start(self, row: DraftRow, layer: int, start: int) -> int:
        """The first position that `layer` can read if the one before it began at `start` in this step."""
        has_input = start > 0 and self._is_written[layer - 1, row.kv_slots[start - 1]]
        return min(start if has_input else start + 1, row.end)

    def _read(self, layer: int, rows: list[DraftRow], starts: list[int], states: Tensor) -> None:
        """One layer over positions `start` … `end - 1` of every row, of which there may be none."""
        spans = [(row, start) for row, start in zip(rows, starts, strict=True) if start < row.end]
        if not spans:
            return
        tokens = [token for row, start in spans for token in row.token_ids[start + 1 : row.end + 1]]
        positions = np.concatenate([np.arange(start, row.end) for row, start in spans])
        written = self._tensor(np.concatenate([row.kv_slots[start : row.end] for row, start in spans]))
        seen = [row.kv_slots[: row.end] for row, _ in spans]
        ragged = AttentionBatch([row.end - start for row, start in spans], seen, written, [None] * len(spans))
        attend = self._attention.plan_layer(layer, ragged)
        token_ids = torch.tensor(tokens, device=self._device)
        output = self._stack.read(layer, token_ids, states, self._tensor(positions), attend)
        self._outputs[layer].index_copy_(0, written, output)

    def _last_outputs(self, rows: list[DraftRow]) -> Tensor:
        """[rows, layers, H] at the rows' last computed tokens; zeros of a layer that a prompt is too short for."""
        slots = np.array([row.kv_slots[row.end - 1] for row in rows])
        outputs = self._outputs.index_select(1, self._tensor(slots)).transpose(0, 1)
        return outputs.masked_fill(~self._tensor(self._is_written[:, slots].T)[:, :, None], 0.0)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class _PerLayer:
    """AttentionBackend in which each layer sees, of the slots that rows name, those in its row of `is_written`."""

    def __init__(self, backend: AttentionBackend, is_written: np.ndarray) -> None:
        self._backend = backend
        self._is_written = is_written

    def plan(self, rows: AttentionBatch) -> Attend:
        plans = [self.plan_layer(layer, rows) for layer in range(len(self._is_written))]
        return lambda layer, q, kv: plans[layer](layer, q, kv)

    def plan_layer(self, layer: int, rows: AttentionBatch) -> Attend:
        """For this layer alone."""
        kv_slots = [slots[self._is_written[layer, slots]] for slots in rows.kv_slots]
        return self._backend.plan(replace(rows, kv_slots=kv_slots))


def _place(config: SpeculativeConfig, target: TargetView) -> tuple[Path, str]:
    """(folder, load format) of what drafts."""
    if config.draft_model_path is None:
        return target.folder, target.load_format
    return resolve_draft(config, progress=False), config.draft_load_format
