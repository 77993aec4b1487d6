"""Quantised weights on a GPU as functions of activations; codes are decoded in registers."""

from typing import Any

import torch
import triton
from torch import Tensor

from specray.ops.gpu import quantised_kernels
from specray.ops.gpu.launches import num_processors
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, Code, QuantisedWeight

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile
COLUMNS = 64
INPUT_BYTES = 128  # of a row in a step of the sum
CODES: dict[Code, Any] = {  # the kernels' constants
    E4M3: quantised_kernels.E4M3,
    E2M1: quantised_kernels.E2M1,
    INT8: quantised_kernels.INT8,
    INT4: quantised_kernels.INT4,
}


class QuantisedMatrix:
    """x [T, in] -> x W^T + b [T, out], of x's type.

    `in_fixed_order`: a row's bits do not depend on the other rows or on their number, so there is one size of tiles.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, in_fixed_order: bool) -> None:
        self._weight, self._bias = weight.to(weight.device), bias
        self._num_programs = num_processors(weight.device)
        self.is_row_wise = in_fixed_order

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        x, weight, bias = x.contiguous(), self._weight, self._bias
        outs, ins = weight.shape
        rows = FEW_ROWS if len(x) <= FEW_ROWS and not self.is_row_wise else MANY_ROWS
        out = torch.empty(len(x), outs, dtype=x.dtype, device=x.device)
        num_tiles = triton.cdiv(len(x), rows) * triton.cdiv(outs, COLUMNS)
        if num_tiles:
            quantised_kernels.multiply_quantised[(min(num_tiles, self._num_programs),)](
                out,
                x,
                *parts_of(weight),
                weight.codes if bias is None else bias,
                len(x),
                outs,
                ins,
                weight.group,
                weight.scales.shape[1],
                HAS_BIAS=bias is not None,
                ROWS=rows,
                COLUMNS=COLUMNS,
                num_warps=num_warps(rows),
                **constants_of(weight, x.dtype),
            )
        return out


def num_warps(rows: int) -> int:
    """Of a program whose tile has so many rows; with fewer than 8, large tiles of 4-bit codes would spill."""
    return 8 if rows == MANY_ROWS else 4


def parts_of(weight: QuantisedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros for a kernel."""
    return weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros


def constants_of(weight: QuantisedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Of a kernel that multiplies activations of `dtype`. Its steps are as long as groups allow."""
    inputs = INPUT_BYTES // dtype.itemsize
    if weight.group < weight.ins:
        inputs = min(inputs, weight.group & -weight.group)  # the largest power of two that divides it
    return {"CODE": CODES[weight.code], "HAS_ZEROS": weight.zeros is not None, "INPUTS": inputs}
