"""Weights in the blocks that the kernels' matrix products read (packing.h)."""

from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.structs import FLOAT_TYPES, GROUP, MatrixStruct, pointer
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, QuantisedWeight, Weight

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
# (code, whether there are zeros) -> likewise
_CODES = {
    (E4M3, False): 12,
    (E2M1, False): 13,
    (INT8, False): 14,
    (INT4, False): 15,
    (INT8, True): 16,
    (INT4, True): 17,
}
_LARGE_SCALE = 128.0
_E8M0 = 3  # type of scales in matrix.h

_WITH_LOWS = {kind for (_, has_lows, _, _), kind in _KINDS.items() if has_lows}  # a group's integer 0 is its low
# A step reads every weight once. From pages of 4 KB, each in a place of its own, one step of a model of 135 million
# weights took 4 % longer, so weights lie in pieces that are large enough for huge pages.
_PIECE = 32 << 20  # bytes; what nobody writes to takes no memory
_LINE = 64  # weights begin at a cache line
_lock = Lock()
_rest = torch.empty(0, dtype=torch.uint8)  # of the newest piece


class Packed(NamedTuple):
    """One weight, or several that one product reads together."""

    struct: MatrixStruct  # has the addresses of the others
    data: Tensor  # uint8
    bias: Tensor | None


def pack(kernels: Kernels, weights: list[Weight], bias: Tensor | None = None) -> Packed:
    """Weights of one shape and format, and the float `bias` of the first one's output channels."""
    if any(map(_is_too_large, weights)):
        weights = [weight if isinstance(weight, Tensor) else weight.float() for weight in weights]
    outs, ins = weights[0].shape
    padding = -outs % kernels.lanes
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, padding)).contiguous()
    struct = _struct_of(weights)
    struct.outs, struct.ins, struct.bias = len(weights) * (outs + padding), ins, pointer(bias)
    data = _blocks(kernels, struct, weights)
    struct.data = pointer(data)
    return Packed(struct, data, bias)


def _is_too_large(weight: Weight) -> bool:
    """Whether the kernels' scales of e4m3, which are 2^120 times as large, could be infinite."""
    if not isinstance(weight, QuantisedWeight) or weight.code != E4M3:
        return False
    return bool((weight.float_scales().abs() >= _LARGE_SCALE).any())


def kind_of(*weights: Weight) -> int:
    """`Kind` in matrix.h that can hold all of these weights, which have one format."""
    weight = weights[0]
    if isinstance(weight, Tensor):
        return FLOAT_TYPES[weight.dtype]
    if isinstance(weight, QuantisedWeight):
        return _CODES[weight.code, weight.zeros is not None]
    has_lows = weight.lows is not None
    fits_float16 = all(isinstance(other, GroupedWeight) and other.is_exact_in_half for other in weights)
    if weight.size == 32 and not fits_float16 and (weight.bits == 8 or not has_lows):
        has_lows = True  # there is no kind of groups of 32 with float32 scales and without lows
    return _KINDS[weight.bits, has_lows, weight.size, fits_float16 and weight.size == 32]


def _struct_of(weights: list[Weight]) -> MatrixStruct:
    """The format of `weights`."""
    kind, weight = kind_of(*weights), weights[0]
    if isinstance(weight, QuantisedWeight):
        scale_type = _E8M0 if weight.scales.dtype is torch.uint8 else FLOAT_TYPES[weight.scales.dtype]
        is_16_bit = all(map(_computes_in_16_bits, weights))
        return MatrixStruct(kind, group=weight.group, scale_type=scale_type, is_16_bit=is_16_bit)
    return MatrixStruct(kind, zero=weight.zero if isinstance(weight, GroupedWeight) and kind not in _WITH_LOWS else 0)


def _computes_in_16_bits(weight: Weight) -> bool:
    """Whether the kernels for models of 16 bits can read the weight."""
    if not isinstance(weight, QuantisedWeight) or weight.dtype is torch.float32:
        return False
    return weight.code == E4M3 or weight.group % GROUP == 0 or weight.group >= weight.ins


def _blocks(kernels: Kernels, struct: MatrixStruct, weights: list[Weight]) -> Tensor:
    """Blocks of all weights, one of each in turn."""
    outs, step = weights[0].shape[0], len(weights)
    num_blocks = step * -(-outs // kernels.lanes)
    data = weight_memory(num_blocks * kernels.block_bytes(struct))
    for place, weight in enumerate(weights):
        for first in range(0, outs, _CHUNK):
            to = pointer(data), place + step * (first // kernels.lanes), step
            part = slice(first, min(first + _CHUNK, outs))
            if isinstance(weight, Tensor):
                rows = weight[part].float().contiguous()
                kernels.pack_dense(struct, pointer(rows), len(rows), *to)
            elif isinstance(weight, QuantisedWeight):
                _pack_codes(kernels, struct, weight.rows(part).to(weight.device), to)
            else:
                _pack_groups(kernels, struct, weight.rows(part), to)
    return data


def _pack_codes(kernels: Kernels, struct: MatrixStruct, weight: QuantisedWeight, to: tuple[Any, ...]) -> None:
    parts = pointer(weight.codes), pointer(weight.scales), pointer(weight.zeros)
    kernels.pack_coded(struct, *parts, len(weight.codes), *to)


def _pack_groups(kernels: Kernels, struct: MatrixStruct, weight: GroupedWeight, to: tuple[Any, ...]) -> None:
    count, ins = weight.shape
    assert weight.ints.shape[1] == -(-ins // GROUP) * GROUP, weight.ints.shape
    ints, scales = weight.ints.contiguous(), weight.scales.contiguous()
    if struct.kind in _WITH_LOWS and weight.lows is None:
        lows = scales * -weight.zero
    else:
        assert weight.lows is None or weight.zero == 0, weight.zero
        lows = scales if weight.lows is None else weight.lows.contiguous()
    kernels.pack_quantised(struct, pointer(ints), pointer(scales), pointer(lows), count, *to)


def weight_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], uninitialised. It keeps its whole piece alive."""
    global _rest
    with _lock:
        if len(_rest) < num_bytes:
            # numpy asks the operating system for huge pages, which torch does not.
            piece = torch.from_numpy(np.empty(max(_PIECE, num_bytes) + _LINE, dtype=np.uint8))
            _rest = piece[-piece.data_ptr() % _LINE :]
        memory, _rest = _rest[:num_bytes], _rest[-(-num_bytes // _LINE) * _LINE :]
        return memory
