"""Weights as quantised checkpoints store them: w = scale * (code - zero), in 8 or 4 bits.

They stay so in memory, and kernels decode them in registers. In models of 16 bits, the CPU kernels round activations of
integer codes to 16 bits in groups of 32; others are not rounded, unlike those that are multiplied with a GroupedWeight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.grouped_weight import GROUP, GroupedWeight

UNIT = 16  # inputs, of which a group is a multiple: the fewest that tensor cores add up


class Code(NamedTuple):
    """What a code stands for."""

    name: str
    bits: int  # 4 or 8
    zero: int | None  # of integers, where a weight has no zeros of its own; None: floats


E4M3 = Code("e4m3", 8, None)  # float8_e4m3fn
E2M1 = Code("e2m1", 4, None)  # of OCP Microscaling 1.0
INT8 = Code("int8", 8, 128)
INT4 = Code("int4", 4, 8)

E2M1_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A matrix [outs, ins] whose outputs have a scale for each `group` of neighbouring inputs."""

    code: Code
    ins: int
    group: int  # a multiple of UNIT, or `ins`; the last group may have fewer
    codes: Tensor  # uint8 [outs, ins]; of 4 bits [outs, ceil(ins / 2)], of two inputs the first in the low bits
    scales: Tensor  # float32, float16 or bfloat16 [outs, groups], or uint8: 2^(scale - 127)
    zeros: Tensor | None = None  # uint8 [outs, groups]; None: `code.zero`
    dtype: torch.dtype = torch.float32  # that the model computes in

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.ins

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)
        return sum(part.numel() * part.itemsize for part in parts)

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN, as only those of E4M3 can be; kernels do not treat it as one."""
        return self.code == E4M3 and bool(((self.codes & 0x7F) == 0x7F).any())

    def float(self) -> Tensor:
        """float32 [outs, ins], exact or rounded once: codes have at most 8 bits, scales at most 24."""
        groups = torch.arange(self.ins, device=self.device) // self.group
        values = self._values()
        if self.code.zero is not None:
            values -= self.code.zero if self.zeros is None else self.zeros.float().index_select(1, groups)
        return values.mul_(self.float_scales().index_select(1, groups))

    def float_scales(self) -> Tensor:
        """float32 [outs, groups]"""
        if self.scales.dtype is torch.uint8:
            return torch.ldexp(torch.ones(self.scales.shape, device=self.device), self.scales.to(torch.int32) - 127)
        return self.scales.float()

    def rows(self, part: slice | Tensor) -> "QuantisedWeight":
        """Some output channels."""
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=zeros)

    def columns(self, start: int, count: int) -> "QuantisedWeight | None":
        """Some inputs; None if their groups would not be of equal size and in multiples of UNIT."""
        per_byte = 8 // self.code.bits
        if start % per_byte or (count % per_byte and start + count < self.ins):
            return None
        if self.group >= self.ins:
            weight = replace(self, group=max(count, 1))
        elif math.gcd(start, self.group) % UNIT:
            return None
        else:
            weight = self.in_groups_of(math.gcd(start, self.group))
            groups = slice(start // weight.group, -(-(start + count) // weight.group))
            zeros = None if weight.zeros is None else weight.zeros[:, groups]
            weight = replace(weight, scales=weight.scales[:, groups], zeros=zeros)
        codes = self.codes[:, start // per_byte : -(-(start + count) // per_byte)]
        return replace(weight, ins=count, codes=codes)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "QuantisedWeight":
        """The weight with contiguous parts on `device`, of a model that computes in `dtype`."""
        zeros = None if self.zeros is None else self.zeros.to(device).contiguous()
        codes, scales = self.codes.to(device).contiguous(), self.scales.to(device).contiguous()
        return replace(self, codes=codes, scales=scales, zeros=zeros, dtype=dtype or self.dtype)

    def grouped(self) -> GroupedWeight | None:
        """The weight for kernels that round activations; None if it has other groups or is no integer."""
        outs, count = self.scales.shape
        if self.code.zero is None or self.ins % GROUP or self.ins // count % GROUP or self.ins % count:
            return None
        repeats = self.ins // count // GROUP
        scales, zero, lows = self.float_scales(), self.code.zero, None
        if self.zeros is not None:
            zero, lows = 0, (scales * -self.zeros.float()).repeat_interleave(repeats, 1)
        ints = self.codes if self.code.bits == 8 else _nibbles(self.codes)[:, : self.ins]
        spread = scales.repeat_interleave(repeats, 1)
        return GroupedWeight(self.ins, ints.contiguous(), spread.view(outs, -1), lows, zero, self.code.bits)

    def _values(self) -> Tensor:
        """float32 [outs, ins] of the codes."""
        if self.code == E4M3:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.code.bits == 8:
            return self.codes.float()
        nibbles = _nibbles(self.codes)[:, : self.ins]
        if self.code == INT4:
            return nibbles.float()
        return torch.tensor(E2M1_VALUES, device=self.device)[nibbles.to(torch.int32)]

    def in_groups_of(self, size: int) -> "QuantisedWeight":
        """Equal weights with more scales: `size` divides the present one, unless there is one group."""
        if size == self.group:
            return self
        index = torch.arange(-(-self.ins // size), device=self.device) * size // self.group
        zeros = None if self.zeros is None else self.zeros.index_select(1, index)
        return replace(self, group=size, scales=self.scales.index_select(1, index), zeros=zeros)


Weight = Tensor | GroupedWeight | QuantisedWeight


def kernel_scales(scales: Tensor) -> Tensor:
    """Scales of a checkpoint, of any type of floats, as a QuantisedWeight holds them."""
    if scales.dtype is torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    return scales if scales.dtype in (torch.float32, torch.float16, torch.bfloat16) else scales.float()


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Output channels of several matrices of one code, in groups of the largest size that divides all of theirs."""
    first = weights[0]
    assert all(weight.code == first.code and weight.ins == first.ins for weight in weights), weights
    size = math.gcd(*(weight.group for weight in weights if weight.group < weight.ins)) or first.ins
    weights = [weight.in_groups_of(size) for weight in weights]
    has_one_type = all(weight.scales.dtype is first.scales.dtype for weight in weights)
    scales = [weight.scales if has_one_type else weight.float_scales() for weight in weights]
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat([_zeros_of(weight) for weight in weights])
    return replace(
        first, group=size, codes=torch.cat([weight.codes for weight in weights]), scales=torch.cat(scales), zeros=zeros
    )


def _zeros_of(weight: QuantisedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    assert weight.code.zero is not None
    return torch.full(weight.scales.shape, weight.code.zero, dtype=torch.uint8, device=weight.device)


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [outs, 2 * bytes]"""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)
