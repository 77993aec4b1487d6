"""Fuses a model's decoder layers into one call of the CPU kernels, where they have the usual shape."""

from collections.abc import Sequence

from torch import Tensor

from specray.layers.norm import RMSNorm
from specray.layers.rotary import RotaryEmbedding
from specray.models.causal_lm import DecoderLayer, FeedForward
from specray.models.llama import Attention
from specray.ops.cpu.layers import FusedLayers, LayerParts
from specray.ops.cpu.library import kernels
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix


def fused_decoder(layers: Sequence[object], rotary: RotaryEmbedding, eps: float) -> FusedLayers | None:
    """`layers` as one function; None if they are not Llama's, are split over ranks, or the kernels are not there."""
    decoders = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    if len(decoders) != len(layers):
        return None
    return fused([(layer.input_norm, layer.attention, layer.ffn_norm, layer.ffn) for layer in decoders], rotary, eps)


def are_row_wise(layers: Sequence[object]) -> bool:
    """Whether all matrix products of `layers` are the kernels', which treat each row alike."""
    return all(
        isinstance(layer, DecoderLayer)
        and isinstance(layer.attention, Attention)
        and isinstance(layer.ffn, FeedForward)
        and _matrices(layer.attention, layer.ffn) is not None
        for layer in layers
    )


def fused(
    layers: Sequence[tuple[RMSNorm | None, object, RMSNorm, object]], rotary: RotaryEmbedding, eps: float
) -> FusedLayers | None:
    """The same for layers of (input norm, attention, norm of the feed-forward, feed-forward)."""
    own = kernels()
    parts = [_parts(*layer) for layer in layers]
    first = layers[0][1]
    if own is None or not isinstance(first, Attention) or any(part is None for part in parts):
        return None
    shape = (first.num_heads, first.num_kv_heads, first.head_dim)
    return FusedLayers(own, [part for part in parts if part is not None], *shape, eps, rotary.tables)


def _parts(input_norm: RMSNorm | None, attention: object, ffn_norm: RMSNorm, ffn: object) -> LayerParts | None:
    if not isinstance(attention, Attention) or not isinstance(ffn, FeedForward) or attention.out.group.size > 1:
        return None
    if (matrices := _matrices(attention, ffn)) is None:
        return None
    input_weight, q_weight, k_weight = (_weight(norm) for norm in (input_norm, attention.q_norm, attention.k_norm))
    return LayerParts(input_weight, q_weight, k_weight, ffn_norm.weight, *matrices)


def _matrices(
    attention: Attention, ffn: FeedForward
) -> tuple[PackedMatrix, PackedMatrix, GatedMatrix, PackedMatrix] | None:
    """The packed matrices of qkv, output, gate and up, and down; None if one is not packed."""
    qkv, out, gate_up, down = attention.qkv.run, attention.out.run, ffn.gate_up.run, ffn.down.run
    if not (isinstance(qkv, PackedMatrix) and isinstance(out, PackedMatrix)):
        return None
    if not (isinstance(gate_up, GatedMatrix) and isinstance(down, PackedMatrix)):
        return None
    return qkv, out, gate_up, down


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
