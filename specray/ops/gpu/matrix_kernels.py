"""Products of rows with a matrix, or with their own expert's, whose sums do not depend on the other rows, with Triton.

All tiles of the result have one size, and a sum runs over the inputs in order, in steps of INPUTS. Every row of every
product with a matrix therefore goes through the same instructions in the same order, however many rows there are. For a
mixture of experts, rows are grouped by expert in blocks of ROWS, which `specray.ops.gpu.experts` makes.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import products


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
        sums = products(rows, columns, is_row, is_column, ins, ROWS, COLUMNS, INPUTS)
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        places = row.to(tl.int64)[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit
def grouped_products(
    out,  # [pairs, outs]
    x,  # [rows, ins]; pair p reads row p // SHARE
    weights,  # [experts, outs, ins]
    block_experts,  # int32 [blocks], -1: no rows
    block_pairs,  # int32 [blocks, ROWS], num_pairs: no row
    num_pairs,
    outs,
    ins,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(block_pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_pair = pair < num_pairs
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < outs
        rows = x + (pair // SHARE)[:, None] * ins
        columns = weights + (expert * outs + column)[:, None] * ins
        sums = products(rows, columns, is_pair, is_column, ins, ROWS, COLUMNS, INPUTS)
        places = pair[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column)
