"""Parts shared by drafters with a model: data types, the target's matrices, and scratch KV slots."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import AttentionBackend, make_pool, recordable, torch_dtype
from specray.ops.backends import make_backend
from specray.ops.layer_attention import LayerAttention
from specray.ops.quantization import check_quantization, quantization_of_choice
from specray.spec_decode.draft_rows import DraftKV
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.tree_shape import TreeShape


class HeadKV(Protocol):
    """The sizes of a draft head's KV and attention."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def layer_attention(self) -> Sequence[LayerAttention] | None: ...

    @property
    def dtype(self) -> torch.dtype: ...


def scratch_slots(target: TargetView, per_row: int) -> Tensor:
    """int64 [max_rows, per_row]: KV slots behind the target's, for each request of a step."""
    slots = torch.arange(target.max_rows * per_row, device=target.device)
    return target.num_slots + slots.view(target.max_rows, per_row)


def head_pool(head: HeadKV, num_slots: int, target: TargetView) -> Tensor:
    """A new KV pool of a draft head."""
    return make_pool(head.num_layers, num_slots, head.num_kv_heads, head.head_dim, head.dtype, target.device)


def head_attention(head: HeadKV, pool: Tensor, target: TargetView) -> AttentionBackend:
    """Attention over the KV pool of a draft head."""
    return make_backend(target.attention_backend, pool, head.num_heads, layers=head.layer_attention)


def head_kv(head: HeadKV, shape: TreeShape, target: TargetView, num_layers: int = 1) -> DraftKV:
    """A new KV pool of a head whose trees have `shape`; see DraftKV."""
    nodes = scratch_slots(target, shape.topk * (shape.num_steps - 1))
    padding_slot = target.num_slots + nodes.numel()
    attention = head_attention(head, head_pool(head, padding_slot + 1, target), target)
    last_position = target.context_length - 1
    return DraftKV(attention, shape, last_position, padding_slot, nodes, num_layers=num_layers)


def attention_without_graphs(attention: AttentionBackend) -> str | None:
    """Why CUDA graphs cannot have this attention; None if they can."""
    if recordable(attention) is not None:
        return None
    return "its attention backend plans every step on the host; set the draft's attention backend to triton"


def draft_dtype(config: SpeculativeConfig, target: TargetView) -> torch.dtype:
    """Type of the drafter's weights and KV."""
    return target.dtype if config.draft_dtype == "auto" else torch_dtype(config.draft_dtype)


def draft_quantization(config: SpeculativeConfig, target: TargetView) -> str | None:
    """See `wanted_quantization`. ConfigError if the device does not support it."""
    name = wanted_quantization(config, target.quantization, target.device)
    check_quantization(name, target.device, draft_dtype(config, target))
    return name


def wanted_quantization(config: SpeculativeConfig, of_target: str | None, device: torch.device) -> str | None:
    """Quantization of the drafter's linears: its own or the target's."""
    name = config.draft_model_quantization or of_target
    if name == "auto":
        return quantization_of_choice(device)
    return None if name == "unquant" else name


def target_matrices(config: SpeculativeConfig, target: TargetView) -> TargetMatrices:
    """The target's matrices for a draft head."""
    return TargetMatrices(
        target.shape,
        target.context_length,
        target.folder,
        target.load_format,
        draft_dtype(config, target),
        target.device,
        target.model,
        draft_quantization(config, target),
        target.moe_runner_backend,
        target.group,
    )
