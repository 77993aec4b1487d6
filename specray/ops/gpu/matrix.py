"""Weight matrices on a GPU as functions of activations whose rows do not affect each other: `deterministic: true`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from specray.ops.gpu.launches import num_processors
from specray.ops.gpu.layers import silu_and_mul
from specray.ops.gpu.matrix_kernels import multiply_rows

ROWS = 64  # of a tile, the fewest that Hopper's warp-group instructions take
COLUMNS = (32, 64)  # of a tile: few where a matrix has too few outputs to give every processor a tile
INPUT_BYTES = 128  # of a row in a step of the sum


class FixedOrderMatrix:
    """x [T, in] -> x W^T + b [T, out], of x's type. A row's bits do not depend on the other rows or on their number."""

    is_row_wise = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self._num_programs = num_processors(weight.device)
        self._columns = tile_columns(len(weight), self._num_programs)

    def __call__(self, x: Tensor) -> Tensor:
        x, weight, bias = x.contiguous(), self._weight, self._bias
        outs, ins = weight.shape
        out = torch.empty(len(x), outs, dtype=x.dtype, device=x.device)
        num_tiles = triton.cdiv(len(x), ROWS) * triton.cdiv(outs, self._columns)
        if num_tiles:
            multiply_rows[(min(num_tiles, self._num_programs),)](
                out,
                x,
                weight,
                weight if bias is None else bias,
                len(x),
                outs,
                ins,
                HAS_BIAS=bias is not None,
                ROWS=ROWS,
                COLUMNS=self._columns,
                INPUTS=INPUT_BYTES // weight.itemsize,
            )
        return out


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
