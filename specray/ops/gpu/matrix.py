"""Weight matrices on a GPU as functions of activations, by Triton's tiled products.

These compute rows that do not affect each other (`deterministic: true`), and decode codes in registers. Codes of fp8
are not left to torch._scaled_mm, which multiplies activations that are rounded to fp8.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from specray.ops.gpu import matrix_kernels
from specray.ops.gpu.launches import num_processors
from specray.ops.gpu.layers import silu_and_mul
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, Code, QuantisedWeight

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile; 64 are the fewest that Hopper's warp-group instructions take
COLUMNS = (32, 64)  # of a tile: few where a matrix has too few outputs to give every processor a tile
INPUT_BYTES = 128  # of a row in a step of the sum
CODES: dict[Code | None, Any] = {  # the kernels' constants; None: a matrix of numbers
    None: matrix_kernels.NUMBERS,
    E4M3: matrix_kernels.E4M3,
    E2M1: matrix_kernels.E2M1,
    INT8: matrix_kernels.INT8,
    INT4: matrix_kernels.INT4,
}
Stored = Tensor | QuantisedWeight


class TiledMatrix:
    """x [T, in] -> x W^T + b [T, out], of x's type.

    `in_fixed_order`: a row's bits do not depend on the other rows or on their number, so there is one size of tiles.
    """

    def __init__(self, weight: Stored, bias: Tensor | None = None, in_fixed_order: bool = True) -> None:
        self._weight = weight.contiguous() if isinstance(weight, Tensor) else weight.to(weight.device)
        self._bias = bias
        self._num_programs = num_processors(weight.device)
        is_coded = isinstance(weight, QuantisedWeight)
        self._columns = COLUMNS[1] if is_coded else tile_columns(weight.shape[0], self._num_programs)
        self.is_row_wise = in_fixed_order

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes if isinstance(self._weight, Tensor) else self._weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        x, (outs, ins) = x.contiguous(), self._weight.shape
        rows = FEW_ROWS if len(x) <= FEW_ROWS and not self.is_row_wise else MANY_ROWS
        out = torch.empty(len(x), outs, dtype=x.dtype, device=x.device)
        num_tiles = triton.cdiv(len(x), rows) * triton.cdiv(outs, self._columns)
        if num_tiles:
            launch = launch_of(self._weight, self._bias, x.dtype)
            matrix_kernels.multiply_rows[(min(num_tiles, self._num_programs),)](
                out,
                x,
                *launch.parts,
                len(x),
                outs,
                ins,
                *launch.groups,
                **launch.constants,
                ROWS=rows,
                COLUMNS=self._columns,
                num_warps=num_warps(self._weight, rows),
            )
        return out


class Launch(NamedTuple):
    """What the kernels take of a weight and its bias."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor]  # weight or codes, scales, zeros, bias
    groups: tuple[int, int]  # inputs that share a scale, and their number
    constants: dict[str, Any]


def launch_of(weight: Stored, bias: Tensor | None, dtype: torch.dtype) -> Launch:
    """For activations of `dtype`. Steps are as long as groups allow."""
    inputs, has_bias = INPUT_BYTES // dtype.itemsize, bias is not None
    if isinstance(weight, Tensor):
        unused = weight if bias is None else bias
        constants = {"CODE": CODES[None], "HAS_ZEROS": False, "HAS_BIAS": has_bias, "INPUTS": inputs}
        return Launch((weight, weight, weight, unused), (weight.shape[1], 1), constants)
    if weight.group < weight.ins:
        inputs = min(inputs, weight.group & -weight.group)  # the largest power of two that divides it
    codes, zeros = weight.codes, weight.zeros
    parts = codes, weight.scales, codes if zeros is None else zeros, codes if bias is None else bias
    constants = {"CODE": CODES[weight.code], "HAS_ZEROS": zeros is not None, "HAS_BIAS": has_bias, "INPUTS": inputs}
    return Launch(parts, (weight.group, weight.scales.shape[1]), constants)


def num_warps(weight: Stored, rows: int) -> int:
    """Of a program whose tile has so many rows; with fewer than 8, large tiles of 4-bit codes would spill."""
    return 8 if rows == MANY_ROWS and isinstance(weight, QuantisedWeight) else 4


class GatedUnits:
    """x [T, in] -> silu(gate) * up [T, out], of a function that gives gate and up side by side."""

    def __init__(self, gate_up: Callable[[Tensor], Tensor]) -> None:
        self._gate_up = gate_up
        self.is_row_wise = bool(getattr(gate_up, "is_row_wise", False))

    def __call__(self, x: Tensor) -> Tensor:
        return gated_units(self._gate_up(x))


def gated_units(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, size] from [T, 2 * size], gate first."""
    if torch.compiler.is_compiling():  # the compiler fuses this itself
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    return silu_and_mul(gate_up)


def tile_columns(outs: int, processors: int) -> int:
    """Columns of a tile. They depend on the matrix alone, so that all its products are computed alike."""
    narrow, wide = COLUMNS
    return wide if outs >= wide * processors else narrow
