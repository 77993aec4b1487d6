"""The weights of decoder layers as the CPU kernels read them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specray.ops.cpu import structs
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix
from specray.ops.cpu.screen import Screen
from specray.ops.cpu.structs import FLOAT_TYPES, LayerStruct, SizesStruct, pointer


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Weights of one layer: grouped-query attention and a gated feed-forward."""

    input_norm: Tensor | None  # [hidden]; None in a first layer whose input the caller has prepared
    q_norm: Tensor | None  # [dim]
    k_norm: Tensor | None
    ffn_norm: Tensor
    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: GatedMatrix
    down: PackedMatrix

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in (self.qkv, self.out, self.gate_up, self.down))


class EmbedAndHead:
    """A model's embedding [vocab, H], its final norm, float32 [H], and its output matrix with a screen, if any."""

    def __init__(
        self, embedding: Tensor, norm: Tensor, output: PackedMatrix, num_columns: int, screen: Screen | None
    ) -> None:
        """`num_columns` of the output matrix are the vocabulary."""
        self._keep_alive = (embedding.contiguous(), norm, output, screen)  # the struct has their addresses
        self.struct = structs.EmbedAndHeadStruct(
            pointer(self._keep_alive[0]),
            FLOAT_TYPES[embedding.dtype],
            num_columns,
            pointer(norm),
            output.struct,
            structs.ScreenStruct() if screen is None else screen.struct,
        )
        self.num_bytes = output.num_bytes


class PackedLayers:
    """Layers of one shape, as structs."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[LayerParts],
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        eps: float,
        cos_sin: tuple[Tensor, Tensor],
    ) -> None:
        """`cos_sin` are RotaryEmbedding's float32 tables."""
        first = layers[0]
        self.kernels = kernels
        self._keep_alive: list[Tensor | LayerParts] = [*layers]  # the structs have the addresses of their data
        self.structs = (LayerStruct * len(layers))(*(self._struct(layer) for layer in layers))
        self.sizes = SizesStruct(first.out.columns, first.gate_up.columns, num_heads, num_kv_heads, dim, eps)
        self.num_bytes = sum(layer.num_bytes for layer in layers)
        self._keep_alive += cos_sin
        self.cos, self.sin = map(pointer, cos_sin)

    def _struct(self, layer: LayerParts) -> LayerStruct:
        norms = [self._weight(norm) for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.ffn_norm)]
        matrices = (layer.qkv.struct, layer.out.struct, layer.gate_up.struct, layer.down.struct)
        return LayerStruct(*norms, *matrices)

    def _weight(self, norm: Tensor | None) -> int | None:
        if norm is None:
            return None
        weight = norm.float().contiguous()
        self._keep_alive.append(weight)
        return pointer(weight)
