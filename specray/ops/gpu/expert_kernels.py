"""The Triton kernel of a mixture of experts: products of rows with their own expert's matrix, in one launch.

Rows are grouped by expert in blocks of ROWS; `specray.ops.gpu.experts` makes the blocks. A row's sum runs over the
inputs in order, in steps of INPUTS, whatever the other rows of its block are.
"""

import triton
import triton.language as tl

from specray.ops.gpu.dot_kernels import products


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
