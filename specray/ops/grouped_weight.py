"""Weights as small integers in groups of inputs, as GGUF stores them: w = scale * (integer - zero) + low.

int8 rounds each group of 32 inputs to 127 levels on each side of zero, int4 to 16 levels between its smallest and its
largest weight. No calibration is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.errors import ConfigError

GROUP = 32
SMALLEST_HALF = 6.2e-5  # smaller scales lose precision in float16


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A matrix [outs, ins], padded to `width` inputs, a multiple of 32."""

    ins: int
    ints: Tensor  # uint8 [outs, width], below 2 ** bits
    scales: Tensor  # float32 [outs, width / size]
    lows: Tensor | None  # float32 [outs, width / size]; None: zeros
    zero: int
    bits: int  # 4 or 8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.ints), self.ins

    @property
    def size(self) -> int:
        """Inputs of a group, 16 or 32."""
        return self.ints.shape[1] // self.scales.shape[1]

    @property
    def is_exact_in_half(self) -> bool:
        """Whether scales and lows are float16 numbers."""
        parts = [self.scales] if self.lows is None else [self.scales, self.lows]
        return all(torch.equal(part.half().float(), part) for part in parts)

    def float(self) -> Tensor:
        """float32 [outs, ins]"""
        groups = self.ints.view(*self.scales.shape, self.size).float() - self.zero
        values = groups * self.scales[..., None]
        return (values if self.lows is None else values + self.lows[..., None]).flatten(1)[:, : self.ins]

    def rows(self, part: slice) -> "GroupedWeight":
        """Some output channels."""
        lows = None if self.lows is None else self.lows[part]
        return GroupedWeight(self.ins, self.ints[part], self.scales[part], lows, self.zero, self.bits)

    def columns(self, start: int, count: int) -> "GroupedWeight":
        """Some inputs, in whole groups. ConfigError if they are not."""
        if start % GROUP or count % GROUP:
            raise ConfigError(
                f"a rank's part of a quantised matrix, {count} of {self.ins} inputs from {start} on, is not in whole "
                f"groups of {GROUP}; lower tp_size or set quantization: null"
            )
        inside, groups = slice(start, start + count), slice(start // self.size, (start + count) // self.size)
        lows = None if self.lows is None else self.lows[:, groups]
        return GroupedWeight(count, self.ints[:, inside], self.scales[:, groups], lows, self.zero, self.bits)


def to_int8(weight: Tensor) -> GroupedWeight:
    """`weight` [outs, ins] of any float type, rounded to 8 bits; inputs are padded with zeros to whole groups."""
    groups = _grouped(weight)
    scales = _as_half(groups.abs().amax(-1) / 127)
    ints = (groups / scales[..., None].clamp(min=1e-38)).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return GroupedWeight(weight.shape[1], ints.flatten(1), scales, None, 128, 8)


def to_int4(weight: Tensor) -> GroupedWeight:
    """`weight` [outs, ins] of any float type, rounded to 4 bits; inputs are padded with zeros to whole groups.

    Of several ranges a little inside the extremes, each group takes the one with the smallest squared error.
    """
    groups = _grouped(weight)
    low, high = groups.amin(-1), groups.amax(-1)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for shrink in (0.0, 0.02, 0.04, 0.06, 0.08, 0.1):
        inside = shrink * (high - low)
        scales, lows = _as_half((high - low - 2 * inside) / 15), _as_half(low + inside)
        ints = ((groups - lows[..., None]) / scales[..., None].clamp(min=1e-38)).round_().clamp_(0, 15)
        error = (ints * scales[..., None] + lows[..., None] - groups).square_().sum(-1)
        if best is None:
            best = ints, scales, lows, error
            continue
        is_better = error < best[3]
        columns = (ints, scales, lows, error)
        best = tuple(  # type: ignore[assignment]
            torch.where(is_better[..., None] if new.dim() > is_better.dim() else is_better, new, old)
            for new, old in zip(columns, best, strict=True)
        )
    assert best is not None
    ints, scales, lows, _ = best
    return GroupedWeight(weight.shape[1], ints.to(torch.uint8).flatten(1), scales, lows, 0, 4)


def concatenated(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Output channels of several matrices, in groups of the finest size and with the most bits among them."""
    size, bits = min(weight.size for weight in weights), max(weight.bits for weight in weights)
    zeros = {weight.zero for weight in weights}
    needs_lows = len(zeros) > 1 or any(weight.lows is not None for weight in weights)
    lows = torch.cat([_lows(weight, size) for weight in weights]) if needs_lows else None
    scales = torch.cat([_spread(weight.scales, weight.size // size) for weight in weights])
    ints = torch.cat([weight.ints for weight in weights])
    return GroupedWeight(weights[0].ins, ints, scales, lows, 0 if needs_lows else zeros.pop(), bits)


def _lows(weight: GroupedWeight, size: int) -> Tensor:
    """The value of integer 0 in each group."""
    lows = weight.scales * -weight.zero if weight.lows is None else weight.lows - weight.scales * weight.zero
    return _spread(lows, weight.size // size)


def _spread(per_group: Tensor, count: int) -> Tensor:
    return per_group.repeat_interleave(count, 1)


def _grouped(weight: Tensor) -> Tensor:
    """float32 [outs, groups, GROUP], padded with zeros."""
    weight = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    return weight.view(len(weight), weight.shape[1] // GROUP, GROUP)


def _as_half(scales: Tensor) -> Tensor:
    """Scales rounded to float16, where that keeps their precision in every group."""
    sizes = scales.abs()
    is_safe = ((sizes == 0) | ((sizes >= SMALLEST_HALF) & (sizes < 65504))).all()
    return scales.half().float() if is_safe else scales
