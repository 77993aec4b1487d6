"""A copy of an output matrix in 8 bits, which shows where a row's largest logits are; see screen.h.

Of SmolLM2-135M in bfloat16, a step then reads a tenth less.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specray.ops.cpu import structs
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.packing import Packed, pack
from specray.ops.cpu.structs import pointer
from specray.ops.grouped_weight import GROUP, SMALLEST_HALF, GroupedWeight

_Q8_ROUGH = 11  # `Kind` in matrix.h
_ZERO = 128  # the integer that stands for 0
_CHUNK = 4096  # rows that are rounded at once
_MARGIN = 1.001  # for the rounding of the norms themselves


class Screen(NamedTuple):
    """The copy, with what bounds its error. Float32 tensors have one number for each output channel of the blocks."""

    packed: Packed
    errors: Tensor  # the norm of each channel's rounding error; infinite for padding
    norms: Tensor  # the larger norm of each channel and its copy

    @classmethod
    def of(cls, kernels: Kernels, weight: Tensor) -> "Screen | None":
        """None for weights that are not finite, or too large for scales in float16."""
        outs, ins = weight.shape
        width = -(-ins // GROUP) * GROUP
        copy = GroupedWeight(
            ins, torch.empty(outs, width, dtype=torch.uint8), torch.empty(outs, width // GROUP), None, _ZERO, 8
        )
        errors, norms = torch.zeros(2, outs)
        for first in range(0, outs, _CHUNK):  # so that loading takes little more memory than the copy
            part = slice(first, min(first + _CHUNK, outs))
            _round_into(copy.rows(part), errors[part], norms[part], weight[part].float())
        if not copy.scales.isfinite().all():
            return None
        packed = pack(kernels, [copy])
        packed.struct.kind = _Q8_ROUGH
        padding = packed.struct.outs - outs
        return cls(packed, pad(errors * _MARGIN, (0, padding), value=torch.inf), pad(norms * _MARGIN, (0, padding)))

    @property
    def struct(self) -> structs.ScreenStruct:
        return structs.ScreenStruct(self.packed.struct, pointer(self.errors), pointer(self.norms))

    @property
    def num_bytes(self) -> int:
        return len(self.packed.data)


def _round_into(copy: GroupedWeight, errors: Tensor, norms: Tensor, rows: Tensor) -> None:
    """Fill `copy` with `rows` [n, ins] in 8 bits, `errors` and `norms` [n]."""
    groups = pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP)
    # Larger scales than a group needs cost precision, which the bounds account for.
    copy.scales.copy_((groups.abs().amax(-1) / 127).clamp(min=SMALLEST_HALF).half())
    copy.ints.copy_((groups / copy.scales[..., None]).round_().clamp_(-127, 127).add_(_ZERO).flatten(1))
    copied = copy.float()
    errors.copy_((rows - copied).norm(dim=1))
    norms.copy_(torch.maximum(rows.norm(dim=1), copied.norm(dim=1)))
