"""Weight matrices packed for the CPU kernels, as functions of activations."""

import ctypes

import torch
from torch import Tensor

from specray.ops.cpu.library import FLOAT_TYPES, GROUP, Kernels, Matrix, pointer
from specray.ops.cpu.threads import num_threads
from specray.ops.grouped_weight import GroupedWeight, Weight

_CHUNK = 1024  # output channels packed at a time, a multiple of a block's
# (bits, whether there are lows, inputs of a group, whether scales are float16) -> `Kind` in matrix.h
_KINDS = {
    (4, False, 32, True): 3,
    (4, True, 32, True): 4,
    (4, True, 32, False): 5,
    (8, False, 32, True): 6,
    (8, True, 32, True): 7,
    (8, True, 32, False): 8,
    (8, False, 16, False): 9,
    (8, True, 16, False): 10,
}

_WITH_LOWS = {kind for (_, has_lows, _, _), kind in _KINDS.items() if has_lows}  # a group's integer 0 is its low


class PackedMatrix:
    """x [T, in] -> x W^T + b [T, out], of x's type; rows that are not finite stay not finite.

    Rows do not affect each other, whatever their number. `struct` is what the kernels read.
    """

    is_row_wise = True

    def __init__(self, kernels: Kernels, weight: Weight, bias: Tensor | None = None) -> None:
        self.columns, self.ins = weight.shape
        self._kernels = kernels
        self._data = _packed(kernels, [weight])
        self._bias = None if bias is None else _padded(bias.float(), kernels.lanes)
        self.struct = _struct([weight], _padded_size(self.columns, kernels.lanes), self._data, self._bias)

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype` is that of the result, by default x's."""
        x = x.contiguous()
        y = torch.empty(len(x), self.columns, dtype=dtype or x.dtype)
        self._kernels.linear(
            ctypes.byref(self.struct),
            pointer(x),
            FLOAT_TYPES[x.dtype],
            len(x),
            pointer(y),
            FLOAT_TYPES[y.dtype],
            self.columns,
            num_threads(self.num_bytes),
        )
        return y


class GatedMatrix:
    """x [T, in] -> silu(x gate^T) * (x up^T) [T, out]. Both matrices have one type."""

    is_row_wise = True

    def __init__(self, kernels: Kernels, gate: Weight, up: Weight) -> None:
        assert gate.shape == up.shape, (gate.shape, up.shape)
        self.columns, self.ins = gate.shape
        self._kernels = kernels
        self._data = _packed(kernels, [gate, up])
        self.struct = _struct([gate, up], 2 * _padded_size(self.columns, kernels.lanes), self._data, None)

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), self.columns, dtype=x.dtype)
        self._kernels.gated(
            ctypes.byref(self.struct),
            pointer(x),
            FLOAT_TYPES[x.dtype],
            len(x),
            pointer(y),
            FLOAT_TYPES[y.dtype],
            self.columns,
            num_threads(self.num_bytes),
        )
        return y


def kind_of(*weights: Weight) -> int:
    """`Kind` in matrix.h that can hold all of these weights, which have one format."""
    weight = weights[0]
    if isinstance(weight, Tensor):
        return FLOAT_TYPES[weight.dtype]
    has_lows = weight.lows is not None
    is_half = all(isinstance(other, GroupedWeight) and other.is_exact_in_half for other in weights)
    if weight.size == 32 and not is_half and (weight.bits == 8 or not has_lows):
        has_lows = True  # there is no kind of groups of 32 with float32 scales and without lows
    return _KINDS[weight.bits, has_lows, weight.size, is_half and weight.size == 32]


def _struct(weights: list[Weight], outs: int, data: Tensor, bias: Tensor | None) -> Matrix:
    kind, weight = kind_of(*weights), weights[0]
    zero = 0 if isinstance(weight, Tensor) or kind in _WITH_LOWS else weight.zero
    return Matrix(kind, outs, weight.shape[1], zero, pointer(data), pointer(bias))


def _packed(kernels: Kernels, weights: list[Weight]) -> Tensor:
    """Blocks of all weights, one of each in turn."""
    kind, (outs, ins), step = kind_of(*weights), weights[0].shape, len(weights)
    num_blocks = step * _padded_size(outs, kernels.lanes) // kernels.lanes
    data = torch.empty(num_blocks * kernels.block_bytes(kind, ins), dtype=torch.uint8)
    for place, weight in enumerate(weights):
        for first in range(0, outs, _CHUNK):
            block = place + step * (first // kernels.lanes)
            part = slice(first, min(first + _CHUNK, outs))
            if isinstance(weight, Tensor):
                rows = weight[part].float().contiguous()
                kernels.pack_dense(kind, pointer(rows), len(rows), ins, pointer(data), block, step)
            else:
                _pack_groups(kernels, kind, weight.rows(part), pointer(data), block, step)
    return data


def _pack_groups(kernels: Kernels, kind: int, weight: GroupedWeight, data: int | None, block: int, step: int) -> None:
    count, ins = weight.shape
    assert weight.ints.shape[1] == -(-ins // GROUP) * GROUP, weight.ints.shape
    ints, scales = weight.ints.contiguous(), weight.scales.contiguous()
    if kind in _WITH_LOWS and weight.lows is None:
        lows = scales * -weight.zero
    else:
        assert weight.lows is None or weight.zero == 0, weight.zero
        lows = scales if weight.lows is None else weight.lows.contiguous()
    kernels.pack_quantised(kind, pointer(ints), pointer(scales), pointer(lows), count, ins, data, block, step)


def _padded(bias: Tensor, lanes: int) -> Tensor:
    return torch.nn.functional.pad(bias, (0, -len(bias) % lanes)).contiguous()


def _padded_size(outs: int, lanes: int) -> int:
    return -(-outs // lanes) * lanes
