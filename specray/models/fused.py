"""Fuses a model's decoder layers into one call of the CPU kernels, where they have the usual shape."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.layers.linear import ColumnParallelLinear, VocabEmbedding, VocabHead
from specray.layers.norm import RMSNorm
from specray.layers.rotary import RotaryEmbedding
from specray.models.decoder_layer import DecoderLayer, FeedForward
from specray.models.fused_forward import whole_matrix
from specray.models.llama import Attention
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix
from specray.ops.cpu.packed_layers import LayerParts
from specray.ops.cpu.packed_network import CoarseOutput, Fusion, StateInput
from specray.ops.cpu.trees import TreeNetwork
from specray.ops.quantised_weight import Weight


class StateLayers(NamedTuple):
    """How a draft model joins a token's embedding and a state; see StateInput."""

    token_norm: object | None  # an RMSNorm
    state_norm: object | None
    project: object | None  # a ColumnParallelLinear
    state_first: bool = False
    residual_is_normed: bool = False


def fused_decoder(layers: Sequence[object], rotary: RotaryEmbedding, eps: float) -> FusedLayers | None:
    """`layers` as one function; None if they are not Llama's, are split over ranks, or the kernels are unavailable."""
    decoders = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    if len(decoders) != len(layers):
        return None
    return fused([(layer.input_norm, layer.attention, layer.ffn_norm, layer.ffn) for layer in decoders], rotary, eps)


def fused(
    layers: Sequence[tuple[object | None, object, object, object]], rotary: RotaryEmbedding, eps: float
) -> FusedLayers | None:
    """The CPU kernels of layers of (input norm, attention, norm of the feed-forward, feed-forward), or None.

    They have the layers of Llama models, unless these are split over ranks.
    """
    parts = [_parts(*layer) for layer in layers]
    first = layers[0][1]
    if not isinstance(first, Attention) or any(part is None for part in parts):
        return None
    shape = (first.num_heads, first.num_kv_heads, first.head_dim)
    packed = [part for part in parts if part is not None]
    return FusedLayers(packed[0].qkv.kernels, packed, *shape, eps, rotary.tables)


def tree_network(
    layers: FusedLayers | None,
    embedding: VocabEmbedding,
    states: StateLayers | None,
    norm: object | None,
    head: VocabHead,
    target_ids: Tensor | None,
    num_columns: int,
    state_is_normed: bool = False,
    output_is_normed: bool = False,
    quantised_output: Weight | None = None,
    fusion: Fusion | None = None,
) -> TreeNetwork | None:
    """A draft model as one function that grows trees; None if it is not fused.

    `states` None: the layers read the embedding alone. `quantised_output` are the weights of `head`, to
    be read in a coarse form. The other arguments are those of TreeNetwork.
    """
    matrix = whole_matrix(embedding, head)
    if layers is None or matrix is None:
        return None
    inputs = None if states is None else _state_input(states)
    weight = _packed_weight(norm)
    ids = None if target_ids is None else target_ids.to(torch.int64)
    output = matrix if quantised_output is None else CoarseOutput.of(layers.kernels, quantised_output)
    return TreeNetwork(
        layers, embedding.weight, inputs, weight, output, num_columns, ids, state_is_normed, output_is_normed, fusion
    )


def _state_input(layers: StateLayers) -> StateInput:
    matrix = layers.project.run if isinstance(layers.project, ColumnParallelLinear) else None
    assert matrix is None or isinstance(matrix, PackedMatrix), "packed like the layers that read it"
    norms = _packed_weight(layers.token_norm), _packed_weight(layers.state_norm)
    return StateInput(*norms, matrix, layers.state_first, layers.residual_is_normed)


def _parts(input_norm: object | None, attention: object, ffn_norm: object, ffn: object) -> LayerParts | None:
    if not isinstance(attention, Attention) or not isinstance(ffn, FeedForward) or attention.out.group.size > 1:
        return None
    assert isinstance(ffn_norm, RMSNorm)
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


def _weight(norm: object | None) -> Tensor | None:
    return norm.weight if isinstance(norm, RMSNorm) else None


def _packed_weight(norm: object | None) -> Tensor | None:
    return norm.packed if isinstance(norm, RMSNorm) else None
