"""Weight matrices on a GPU as functions of activations, with a kernel of our own for few rows."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from specray.ops.gpu.few_row_kernels import multiply_few_rows
from specray.ops.gpu.launches import num_processors, starts_early
from specray.ops.gpu.matrix import gated_units

MOST_ROWS = 8  # as many as the tensor cores' smallest tile has columns
NEAR_BYTES = 1024  # of each row of a matrix that are brought near before the activations are there; 2048 are slower
SHARED_BYTES = 128 << 10  # that a program may take
NUM_STAGES = 4
_HOPPER = 9  # compute capability of GPUs that have so much; on others the kernel has not run
_HALF_TYPES = (torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """What a program computes at once."""

    columns: int
    inputs: int
    num_warps: int


# The fastest of thirteen on an H200: with each, enough of the matrix is on its way from memory.
WIDE, DEEP, NARROW = Tile(32, 256, 2), Tile(32, 512, 2), Tile(16, 512, 1)


class GpuMatrix:
    """x [T, in] -> x W^T + b [T, out]: few rows with Triton if the matrix `is_fit`, more with torch's matmul."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self._processors = num_processors(weight.device)
        self.is_fit = weight.dtype in _HALF_TYPES and weight.shape[1] % DEEP.inputs == 0 and _has_room(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._few_rows(x) if self._has_few(x) else F.linear(x, self._weight, self._bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual` [T, out], a new tensor."""
        return self._few_rows(x, residual) if self._has_few(x) else self(x).add_(residual)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up [T, out / 2] of a product that is gate and up side by side."""
        return self._few_rows(x, is_gated=True) if self._has_few(x) else gated_units(self(x))

    def _has_few(self, x: Tensor) -> bool:
        is_few = not torch.compiler.is_compiling() and x.dim() == 2 and 0 < len(x) <= MOST_ROWS
        return is_few and self.is_fit and x.dtype == self._weight.dtype

    def _few_rows(self, x: Tensor, residual: Tensor | None = None, is_gated: bool = False) -> Tensor:
        x, weight, bias = x.contiguous(), self._weight, self._bias
        outs, ins = len(weight) // 2 if is_gated else len(weight), weight.shape[1]
        tile = tile_of(outs, is_gated, self._processors)
        out = torch.empty(len(x), outs, dtype=x.dtype, device=x.device)
        multiply_few_rows[(triton.cdiv(outs, tile.columns),)](
            out,
            x,
            weight,
            weight if bias is None else bias,
            x if residual is None else residual.contiguous(),
            len(x),
            outs,
            ins,
            GATED=is_gated,
            HAS_BIAS=bias is not None,
            ADDS=residual is not None,
            ROWS=MOST_ROWS,
            COLUMNS=tile.columns,
            INPUTS=tile.inputs,
            NEAR_BYTES=NEAR_BYTES,
            THREAD_BYTES=thread_bytes(tile),
            num_warps=tile.num_warps,
            num_stages=NUM_STAGES,
            **starts_early(x.device),
        )
        return out


def thread_bytes(tile: Tile) -> int:
    """Of what a program brings near."""
    return NEAR_BYTES * tile.columns // (32 * tile.num_warps)


def _has_room(device: torch.device) -> bool:
    """Whether a program may take SHARED_BYTES on `device`."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major == _HOPPER


def tile_of(outs: int, is_gated: bool, processors: int) -> Tile:
    """The fastest one for a matrix of an 8B model on an H200: one program for each processor, or three, or many."""
    if is_gated or outs > 3 * NARROW.columns * processors:
        return WIDE
    return DEEP if outs <= DEEP.columns * processors else NARROW
