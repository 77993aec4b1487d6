"""Drafts of a model that reads the target's KV and has none of its own: Gemma 4's assistants.

Importing this module takes seconds, because it imports transformers' models.
SGLang calls the method FROZEN_KV_MTP, vLLM mtp. A step needs the target's hidden state at the last committed position
and nothing from earlier steps, so missed steps and cached prefixes are nothing special.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft
from specray.models.heads.gemma_assistant import GemmaAssistant, check_gemma_assistant
from specray.models.loading import Loader
from specray.models.registry import load_config
from specray.ops.attention import Attend, AttentionBatch
from specray.ops.backends import make_backend
from specray.spec_decode.draft_rows import AttendLevel, DraftKV
from specray.spec_decode.draft_setup import draft_quantization
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TargetFiles, TargetView
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.scheduled_rows import Reads, ScheduledRows
from specray.spec_decode.tree_growth import TreeGrower
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape


def make_frozen_kv(config: SpeculativeConfig, target: TargetView) -> "FrozenKVDrafter":
    """The assistant at `draft_model_path`."""
    if target.model is None or target.kv_pool is None:
        raise _not_inline(config)
    folder = resolve_draft(config, progress=False)
    checked = check_gemma_assistant(folder, target.folder, target.shape)
    quantization = draft_quantization(config, target)
    loader = Loader(folder, config.draft_load_format, target.dtype, target.device, quantization=quantization)
    try:
        model = GemmaAssistant(folder, checked, loader, target.model, load_config(target.folder))
    finally:
        loader.close()
    return FrozenKVDrafter(model, configured_shape(config, target.architecture), target, target.kv_pool)


def check_frozen_kv(config: SpeculativeConfig, target: TargetFiles) -> None:
    """ConfigError for an assistant of another target, or options that one does not read."""
    for name in ("draft_dtype", "token_map"):
        if name in config.changed():
            raise ConfigError(
                f"speculative.{name}={getattr(config, name)!r} has no effect with an assistant, which computes in the "
                "target's type over its whole vocabulary; remove it"
            )
    if target.has_draft_process:
        raise _not_inline(config)
    if target.tp_size > 1:
        raise ConfigError(
            f"{config.draft_model_path} reads the whole KV of the target, of which each of tp_size={target.tp_size} "
            "ranks has a part; set tp_size: 1, or draft with EAGLE3 or NGRAM"
        )
    check_gemma_assistant(resolve_draft(config, progress=False), target.folder, target.shape)


def _not_inline(config: SpeculativeConfig) -> ConfigError:
    return ConfigError(
        f"{config.draft_model_path} reads the target's KV, so it cannot run in a process of its own; set "
        "draft.placement: inline, or draft with EAGLE3 or NGRAM"
    )


class FrozenKVDrafter:
    """Drafter over a GemmaAssistant, not sharded."""

    reads_next_token = False
    reason_without_graphs = "transformers' modules may read on the host what they compute"

    def __init__(self, model: GemmaAssistant, shape: TreeShape, target: TargetView, pool: Tensor) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers: tuple[int, ...] = (target.shape.num_layers,)
        self._model = model
        self._device, self._dtype = target.device, target.dtype
        attention = make_backend(target.attention_backend, pool, model.num_heads, layers=model.layer_attention)
        no_nodes = torch.zeros(target.max_rows, 0, dtype=torch.int64, device=target.device)
        self._kv = DraftKV(attention, shape, target.context_length - 1, target.num_slots, no_nodes)
        self._grower = TreeGrower(model, self._kv, target.device, stays_in_place=True)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        requests = context.requests
        if not requests:
            return DraftTree.from_lists([], self._device)
        assert context.aux_hidden_states is not None
        slots, starts, ends = bounds = context.bounds_of(requests)
        stops = [request.end for request in requests]
        kv_slots = context.table.ops.kv_slots(slots, None, max(stops))
        rows = _FrozenRows(context, requests, [Reads(requests, bounds, kv_slots, stops)])
        states = context.aux_hidden_states.index_select(0, (ends - starts).cumsum(0) - 1).to(self._dtype)
        output = self._model(rows.roots, states, ends, rows.attend_from(self._kv, 1))
        return self._grower.grow(rows, output, ends)

    def release(self, slots: Sequence[int]) -> None:
        """There is no state."""


class _FrozenRows(ScheduledRows):
    """Rows whose nodes attend to the committed tokens alone."""

    def levels(self, kv: DraftKV, shape: TreeShape) -> AttendLevel:
        attend = self.attend_from(kv, shape.topk)
        return lambda _level, _sees: attend

    def attend_from(self, kv: DraftKV, num_nodes: int) -> Attend:
        """Of `num_nodes` queries of each request."""
        [(kv_slots, kv_lens)] = self.prefixes
        repeated = kv_slots.repeat_interleave(num_nodes, 0)
        lengths = [length for length in kv_lens for _ in range(num_nodes)]
        count = len(lengths)
        return kv.attention.plan(AttentionBatch([1] * count, lengths, repeated, repeated[:, 0], [(0, 0)] * count))
