"""Matrices of quantised checkpoints and the weights they stand for.

A matrix is read in parts, so that a rank expands only its own. Products are computed in float32, where they are exact
or rounded once: weights have at most 8 bits, scales at most 24.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, UNIT, QuantisedWeight, kernel_scales

_WORD = 32  # bits


class StoredMatrix(Protocol):
    """A matrix [outs, ins] of a linear layer, or those [experts, ins, outs] of a layer's experts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def part(self, rows: slice, columns: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The weights at these places of the first and the second dimension."""

    @property
    def group(self) -> int | None:
        """Neighbouring inputs that share a scale; None if no kernel has such groups."""

    def packed(self) -> QuantisedWeight | None:
        """The weights as they are stored, those of experts one below the other; None without a `group`."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """w = scale * stored, with a byte for each weight and a scale for each block."""

    stored: Tensor  # float8 or int8 [outs, ins]
    scales: Tensor  # [blocks of outputs, blocks of inputs]
    block: tuple[int, int]  # outputs and inputs of a block

    @classmethod
    def of(cls, name: str, stored: Tensor, scales: Tensor, block: tuple[int, int] | None) -> "ScaledMatrix":
        """`scales` is one number, one for each output, or one for each of the `block`s. ConfigError if it is not."""
        if stored.dim() != 2 or stored.dtype not in _BYTES:
            raise damaged(name, f"is {stored.dtype} {list(stored.shape)} instead of a matrix of float8 or int8")
        _check_scales(name, scales)
        outs, ins = stored.shape
        if scales.numel() == 1:
            return cls(stored, scales.view(1, 1), (max(outs, 1), max(ins, 1)))
        if block is None and scales.numel() == outs:
            return cls(stored, scales.view(outs, 1), (1, max(ins, 1)))
        if block is None or tuple(scales.shape) != (-(-outs // block[0]), -(-ins // block[1])):
            blocks = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
            raise damaged(name, f"of {outs} x {ins} has scales {list(scales.shape)}{blocks}")
        return cls(stored, scales, block)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.stored), self.stored.shape[1]

    def part(self, rows: slice, columns: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        weights = self.stored[rows, columns].to(device, torch.float32)
        scales = self.scales.to(device, torch.float32)
        for dim, (part, length, size) in enumerate(zip((rows, columns), self.shape, self.block, strict=True)):
            places = torch.arange(*part.indices(length), device=device) // size
            scales = scales.index_select(dim, places) if scales.shape[dim] > 1 else scales
        return weights.mul_(scales).to(dtype)

    @property
    def group(self) -> int | None:
        ins = self.shape[1]
        group = min(self.block[1], ins)
        return None if self.stored.dtype is torch.float8_e5m2 or (group < ins and group % UNIT) else group

    def packed(self) -> QuantisedWeight | None:
        (outs, ins), group = self.shape, self.group
        if group is None:
            return None
        scales = kernel_scales(self.scales).index_select(0, torch.arange(outs) // self.block[0])
        codes = self.stored.view(torch.uint8)
        if self.stored.dtype is torch.int8:
            return QuantisedWeight(INT8, ins, group, codes ^ 0x80, scales)
        return QuantisedWeight(E4M3, ins, group, codes, scales)


@dataclass(frozen=True, slots=True)
class WordLayout:
    """How integers are packed into words of 32 bits."""

    bits: int  # 4 or 8
    order: Sequence[int]  # place of each of a word's integers, lowest bits first
    packs_inputs: bool  # a word has integers of consecutive inputs, not outputs
    zero_offset: int  # a zero is larger by this than the stored one

    @property
    def count(self) -> int:
        return _WORD // self.bits

    def unpacked(self, words: Tensor) -> Tensor:
        """uint8 [n, w * count] from int32 words [n, w]."""
        nibble = torch.tensor(self.order, device=words.device).argsort()  # by place
        ints = words[:, :, None] >> (nibble * self.bits).to(torch.int32) & (1 << self.bits) - 1
        return ints.to(torch.uint8).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class IntMatrix:
    """w = scale * (integer - zero), with a scale and a zero for each output and group of inputs."""

    layout: WordLayout
    shape: tuple[int, int]
    words: Tensor  # int32 [ins / count, outs] if words hold inputs, else [ins, outs / count]
    zeros: Tensor | None  # int32 [groups, outs / count]; None: the middle of the range
    scales: Tensor  # [groups, outs]
    groups: Tensor  # int64 [ins]: the group of each input

    @classmethod
    def of(
        cls, name: str, layout: WordLayout, words: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor | int
    ) -> "IntMatrix":
        """`groups` is each input's group, or the size of groups of neighbours, -1 for all inputs.

        ConfigError if the parts do not fit.
        """
        packed = [words] if zeros is None else [words, zeros]
        if any(part.dim() != 2 for part in (*packed, scales)) or any(part.dtype != torch.int32 for part in packed):
            raise damaged(name, "is not packed in words of 32 bits")
        _check_scales(name, scales)
        ins, outs = len(words) * (layout.count if layout.packs_inputs else 1), scales.shape[1]
        if isinstance(groups, int):
            groups = torch.arange(ins) // (max(ins, 1) if groups == -1 else groups)
        index = groups.to(torch.int64)
        num_words = -(-outs // layout.count)
        is_fitting = words.shape[1] == (outs if layout.packs_inputs else num_words) and len(index) == ins
        if not is_fitting or (zeros is not None and zeros.shape != (len(scales), num_words)):
            shapes = [list(part.shape) for part in (*packed, scales)]
            raise damaged(name, f"has words, zeros and scales of shapes {shapes}")
        if ins and (int(index.min()) < 0 or int(index.max()) >= len(scales)):
            found = f"{int(index.min())} … {int(index.max())}"
            raise damaged(name, f"has groups {found} and {len(scales)} scales of each output")
        return cls(layout, (outs, ins), words, zeros, scales, index)

    def part(self, rows: slice, columns: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        places = self.groups[columns].to(device)
        scales, zeros = (part.to(device).index_select(1, places) for part in self._per_group(rows))
        return (self._ints(rows, columns, device) - zeros).mul_(scales).to(dtype)

    @property
    def group(self) -> int | None:
        ins = self.shape[1]
        size = -(-ins // max(len(self.scales), 1))
        are_neighbours = torch.equal(self.groups, torch.arange(ins) // max(size, 1))
        return size if are_neighbours and (size >= ins or size % UNIT == 0) else None

    def packed(self) -> QuantisedWeight | None:
        ins, code, size = self.shape[1], INT4 if self.layout.bits == 4 else INT8, self.group
        if size is None:
            return None
        stored = self._per_group(slice(None))[1].to(torch.uint8)
        zeros = None if bool(stored.eq(1 << self.layout.bits - 1).all()) else stored
        return QuantisedWeight(code, ins, size, self._codes(), kernel_scales(self.scales.t()), zeros)

    def _codes(self) -> Tensor:
        """uint8 [outs, bytes], see QuantisedWeight."""
        if self.layout.packs_inputs:  # in the order of a word's bytes
            return self.words.t().contiguous().view(torch.uint8)
        ints = self.layout.unpacked(self.words).t()[: self.shape[0]]
        return (ints[:, ::2] | ints[:, 1::2] << 4).contiguous()

    def _per_group(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(scales, zeros) float32 [outs, groups] of some outputs."""
        scales, largest = self.scales[:, rows].t().float(), (1 << self.layout.bits) - 1
        if self.zeros is None:
            return scales, torch.full_like(scales, largest // 2 + 1)
        words, inside = _covering(rows, self.shape[0], self.layout.count)
        stored = self.layout.unpacked(self.zeros[:, words])[:, inside].t().to(torch.int32)
        return scales, (stored + self.layout.zero_offset & largest).float()  # a zero of 0 is stored as `largest`

    def _ints(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """float32 [outs, ins] of the packed integers."""
        outs, ins = self.shape
        if self.layout.packs_inputs:
            words, inside = _covering(columns, ins, self.layout.count)
            return self.layout.unpacked(self.words[words, rows].to(device).t())[:, inside].float()
        words, inside = _covering(rows, outs, self.layout.count)
        return self.layout.unpacked(self.words[columns, words].to(device))[:, inside].t().float()


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Experts:
    """w = 2^(scale - 127) * stored for the matrices [experts, ins, outs] of a layer's experts (OCP Microscaling 1.0).

    Two numbers of four bits (E2M1) are in a byte, the first in its low bits. 32 neighbouring inputs share a scale.
    """

    blocks: Tensor  # uint8 [experts, outs, groups of inputs, bytes of a group]
    scales: Tensor  # uint8 [experts, outs, groups of inputs]

    @classmethod
    def of(cls, name: str, blocks: Tensor, scales: Tensor) -> "Mxfp4Experts":
        """ConfigError if the parts do not fit."""
        sizes = tuple(blocks.shape), tuple(scales.shape)
        is_fitting = len(sizes[0]) == 4 and sizes[0][:3] == sizes[1] and sizes[0][3] == _MX_BLOCK // 2
        if not is_fitting or any(part.dtype != torch.uint8 for part in (blocks, scales)):
            found = " and ".join(f"{part.dtype} {list(part.shape)}" for part in (blocks, scales))
            raise damaged(name, f"has blocks and scales {found}")
        if bool((scales == 255).any()):  # NaN
            raise damaged(name, "has scales that are not finite")
        return cls(blocks, scales)

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outs, groups = self.scales.shape
        return experts, groups * _MX_BLOCK, outs

    def part(self, rows: slice, columns: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """See StoredMatrix. The outputs of an expert are contiguous, as linears have them."""
        chosen = range(*rows.indices(self.shape[0]))
        num_columns = len(range(*columns.indices(self.shape[1])))
        weights = torch.empty(len(chosen), self.shape[2], num_columns, device=device, dtype=dtype)
        packed = self.packed()
        for place, expert in enumerate(chosen):  # one at a time, because numbers in float32 take eight times the memory
            outputs = slice(expert * self.shape[2], (expert + 1) * self.shape[2])
            weights[place] = packed.rows(outputs).to(device).float()[:, columns]
        return weights.transpose(1, 2)

    @property
    def group(self) -> int:
        return _MX_BLOCK

    def packed(self) -> QuantisedWeight:
        return QuantisedWeight(
            E2M1, self.shape[1], _MX_BLOCK, self.blocks.flatten(2).flatten(0, 1), self.scales.flatten(0, 1)
        )


_MX_BLOCK = 32
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def _covering(part: slice, length: int, count: int) -> tuple[slice, slice]:
    """(the words that hold `part` of `length` integers, `count` in each; the part's place in them)."""
    start, stop, _ = part.indices(length)
    first = start // count
    return slice(first, -(-stop // count)), slice(start - first * count, stop - first * count)


def _check_scales(name: str, scales: Tensor) -> None:
    if not scales.is_floating_point():
        raise damaged(name, f"has scales of type {scales.dtype} instead of floats")
    if not bool(scales.float().isfinite().all()):
        raise damaged(name, "has scales that are not finite")


def damaged(name: str, problem: str) -> ConfigError:
    """The error of a matrix whose parts do not fit, or cannot be true."""
    return ConfigError(
        f"the quantised matrix {name} {problem}; the files are damaged or quantization_config in config.json describes "
        "others: fetch them again"
    )
