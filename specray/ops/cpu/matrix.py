"""Weight matrices packed for the CPU kernels, as functions of activations."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.packing import pack
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.screen import Screen
from specray.ops.cpu.structs import FLOAT_TYPES, pointer
from specray.ops.quantised_weight import Weight


class PackedMatrix:
    """x [T, in] -> x W^T + b [T, out], of x's type; rows that are not finite stay not finite.

    Rows do not affect each other, whatever their number. `struct` is what the kernels read.
    """

    is_row_wise = True

    def __init__(self, kernels: Kernels, weight: Weight, bias: Tensor | None = None) -> None:
        self.columns, self.ins = weight.shape
        self.kernels = kernels
        self._packed = pack(kernels, [weight], bias)
        self.struct = self._packed.struct

    @property
    def num_bytes(self) -> int:
        return len(self._packed.data)

    def screen_of(self, weight: Weight) -> Screen | None:
        """A screen of this matrix, which was packed from `weight`; None if it is quantised or has a bias."""
        if not isinstance(weight, Tensor) or self.struct.kind != FLOAT_TYPES[weight.dtype] or self.struct.bias:
            return None
        return Screen.of(self.kernels, weight)

    def largest(self, x: Tensor, screen: Screen) -> Tensor:
        """float32 [T, out], of which only the largest of each row are exact, if `screen` is this matrix's."""
        x = x.contiguous()
        y = torch.empty(len(x), self.columns)
        rows = (pointer(x), FLOAT_TYPES[x.dtype], len(x), pointer(y))
        threads = num_threads(screen.num_bytes)
        self.kernels.largest(ctypes.byref(self.struct), ctypes.byref(screen.struct), *rows, self.columns, threads)
        return y

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype` is that of the result, by default x's."""
        return _rows(self.kernels.linear, self, x, dtype or x.dtype)


class GatedMatrix:
    """x [T, in] -> silu(x gate^T) * (x up^T) [T, out]. Both matrices have one type."""

    is_row_wise = True

    def __init__(self, kernels: Kernels, gate: Weight, up: Weight) -> None:
        assert gate.shape == up.shape, (gate.shape, up.shape)
        self.columns, self.ins = gate.shape
        self.kernels = kernels
        self._packed = pack(kernels, [gate, up])
        self.struct = self._packed.struct

    @property
    def num_bytes(self) -> int:
        return len(self._packed.data)

    def __call__(self, x: Tensor) -> Tensor:
        return _rows(self.kernels.gated, self, x, x.dtype)


class PackedMatrices:
    """x [n, T, in] -> [n, T, out], each matrix of it times one of n weights [out, in]."""

    is_row_wise = True

    def __init__(self, kernels: Kernels, weights: Tensor) -> None:
        self._matrices = [PackedMatrix(kernels, weight.contiguous()) for weight in weights]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([matrix(rows) for matrix, rows in zip(self._matrices, x, strict=True)])


def _rows(function: Any, matrix: PackedMatrix | GatedMatrix, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernels' `function` of `matrix` and rows `x`; the result has type `dtype`."""
    x = x.contiguous()
    y = torch.empty(len(x), matrix.columns, dtype=dtype)
    rows = (pointer(x), FLOAT_TYPES[x.dtype], len(x), pointer(y), FLOAT_TYPES[dtype])
    function(ctypes.byref(matrix.struct), *rows, matrix.columns, num_threads(matrix.num_bytes))
    return y
