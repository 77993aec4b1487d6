"""A copy of an output matrix in 8 bits, which shows where a row's largest logits are; see screen.h.

Of SmolLM2-135M in bfloat16, a step then reads a tenth less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu import structs
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.packing import Packed, kind_of, pack
from specray.ops.cpu.pointer import pointer
from specray.ops.grouped_weight import GroupedWeight, to_int8

_Q8, _Q8_ROUGH = 6, 11  # `Kind` in matrix.h
_CHUNK = 4096  # rows whose errors are computed at once
_MARGIN = 1.001  # for the rounding of the norms themselves


class Screen(NamedTuple):
    """The copy, with what bounds its error. Float32 tensors have one number for each output channel of the blocks."""

    packed: Packed
    errors: Tensor  # the norm of each channel's rounding error; infinite for padding
    norms: Tensor  # the larger norm of each channel and its copy

    @classmethod
    def of(cls, kernels: Kernels, weight: Tensor) -> "Screen | None":
        """None for weights whose copy has another kind than the kernel's."""
        copy = to_int8(weight)
        if kind_of(copy) != _Q8:
            return None
        packed = pack(kernels, [copy])
        packed.struct.kind = _Q8_ROUGH
        errors, norms = torch.full((packed.struct.outs,), torch.inf), torch.zeros(packed.struct.outs)
        for first in range(0, len(weight), _CHUNK):
            rows = slice(first, min(first + _CHUNK, len(weight)))
            errors[rows], norms[rows] = _bounds(weight[rows].float(), copy.rows(rows))
        return cls(packed, errors * _MARGIN, norms * _MARGIN)

    @property
    def struct(self) -> structs.Screen:
        return structs.Screen(self.packed.struct, pointer(self.errors), pointer(self.norms))

    @property
    def num_bytes(self) -> int:
        return len(self.packed.data)


def _bounds(rows: Tensor, copy: GroupedWeight) -> tuple[Tensor, Tensor]:
    copied = copy.float()
    return (rows - copied).norm(dim=1), torch.maximum(rows.norm(dim=1), copied.norm(dim=1))
