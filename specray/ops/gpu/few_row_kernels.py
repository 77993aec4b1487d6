"""The product of few rows with a matrix, with Triton. Its time is that of reading the matrix."""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import dot, wait_for_kernels_before


@triton.jit
def _bring_near(rows, ROW_BYTES: tl.constexpr, THREAD_BYTES: tl.constexpr):
    """Start to copy the first ROW_BYTES of each row, whose pointers are `rows`, to the L2 cache."""
    piece = tl.arange(0, ROW_BYTES // THREAD_BYTES) * THREAD_BYTES
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {THREAD_BYTES}; mov.u32 $0, 0;",
        "=r,l",
        [rows.to(tl.int64, bitcast=True)[:, None] + piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def multiply_few_rows(
    out,  # [num_rows, outs]
    x,  # [num_rows, ins], contiguous
    weight,  # [outs, ins], with GATED [2 * outs, ins]: gate, then up; contiguous
    bias,  # [outs]; unused without HAS_BIAS
    residual,  # [num_rows, outs]; unused without ADDS
    num_rows,
    outs,
    ins,  # a multiple of INPUTS
    GATED: tl.constexpr,  # out = silu(gate) * up
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,  # out = product + residual
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    NEAR_BYTES: tl.constexpr,  # of a row of the matrix, brought near while the kernel before ends
    THREAD_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The matrix is the first operand of the tensor cores, whose tiles have few columns and many rows."""
    column, row, place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, INPUTS)
    is_row, is_column = (row < num_rows)[None, :], (column < outs)[:, None]
    first = weight + tl.minimum(column, outs - 1).to(tl.int64) * ins
    second = first + outs.to(tl.int64) * ins
    if EARLY:
        _bring_near(first, NEAR_BYTES, THREAD_BYTES)
        if GATED:
            _bring_near(second, NEAR_BYTES, THREAD_BYTES)
    wait_for_kernels_before(EARLY)
    sums, others = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    values = x + row[None, :] * ins + place[:, None]
    for start in range(0, ins, INPUTS):
        few = tl.load(values + start, mask=is_row, other=0.0)
        sums = dot(tl.load(first[:, None] + start + place), few, sums)
        if GATED:
            others = dot(tl.load(second[:, None] + start + place), few, others)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < outs, other=0.0).to(tl.float32)[:, None]
    # Rounded in between, as if the parts were kernels of their own.
    sums = sums.to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * others.to(out.dtype.element_ty).to(tl.float32)
    places = row[None, :].to(tl.int64) * outs + column[:, None]
    if ADDS:
        sums += tl.load(residual + places, mask=is_row & is_column, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row & is_column)
