"""The product of rows with a matrix whose sums do not depend on the other rows, with Triton.

All tiles of the result have one size, and a sum runs over the inputs in order, in steps of INPUTS. Every row of every
product with a matrix therefore goes through the same instructions in the same order, however many rows there are.
"""

import triton
import triton.language as tl

from specray.ops.gpu.dot_kernels import dot


@triton.jit
def multiply_rows(
    out,  # [num_rows, outs]
    x,  # [num_rows, ins], contiguous
    weight,  # [outs, ins], contiguous
    bias,  # [outs]; unused without HAS_BIAS
    num_rows,
    outs,
    ins,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A program computes several tiles. Those that are computed at the same time read the same part of the weight."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    for tile in range(tl.program_id(0), num_row_tiles * tl.cdiv(outs, COLUMNS), tl.num_programs(0)):
        row = (tile % num_row_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = row < num_rows, column < outs
        rows = x + row.to(tl.int64)[:, None] * ins
        columns = weight + column.to(tl.int64)[:, None] * ins
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, ins, INPUTS):
            place = start + tl.arange(0, INPUTS)
            is_place = place < ins
            a = tl.load(rows + place, mask=is_row[:, None] & is_place, other=0.0)
            b = tl.load(columns + place, mask=is_column[:, None] & is_place, other=0.0)
            sums = dot(a, tl.trans(b), sums)
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        places = row.to(tl.int64)[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)
