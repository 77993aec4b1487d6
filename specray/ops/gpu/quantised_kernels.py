"""Products of rows with weights as quantised checkpoints store them, which are decoded in registers, with Triton.

As in `matrix_kernels`, a sum runs over the inputs in order, in steps of INPUTS, so tiles of one size give a row
the same bits whatever the other rows are. A step lies within one group: it adds up products with codes, which are exact
in any type of activations, and multiplies their sum with the group's scales.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import dot

E4M3: tl.constexpr = tl.constexpr(0)
E2M1: tl.constexpr = tl.constexpr(1)
INT8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)


@triton.jit
def multiply_quantised(
    out,  # [num_rows, outs]
    x,  # [num_rows, ins], contiguous
    codes,  # uint8 [outs, ins], or [outs, ins / 2] of 4 bits
    scales,  # [outs, num_groups]
    zeros,  # uint8 [outs, num_groups]; unused without HAS_ZEROS
    bias,  # [outs]; unused without HAS_BIAS
    num_rows,
    outs,
    ins,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
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
        sums = _products(
            rows,
            column.to(tl.int64),
            codes,
            scales,
            zeros,
            is_row,
            is_column,
            ins,
            group_size,
            num_groups,
            CODE,
            HAS_ZEROS,
            ROWS,
            COLUMNS,
            INPUTS,
        )
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        places = row.to(tl.int64)[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit
def grouped_quantised(
    out,  # [pairs, outs]
    x,  # [rows, ins]; pair p reads row p // SHARE
    codes,  # of all experts' outputs, one below the other, like scales and zeros
    scales,
    zeros,
    block_experts,  # int32 [blocks], -1: no rows
    block_pairs,  # int32 [blocks, ROWS], num_pairs: no row
    num_pairs,
    outs,  # of an expert
    ins,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """See `grouped_products`."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(block_pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_pair = pair < num_pairs
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < outs
        sums = _products(
            x + (pair // SHARE)[:, None] * ins,
            expert * outs + column,
            codes,
            scales,
            zeros,
            is_pair,
            is_column,
            ins,
            group_size,
            num_groups,
            CODE,
            HAS_ZEROS,
            ROWS,
            COLUMNS,
            INPUTS,
        )
        places = pair[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column)


@triton.jit
def _products(
    rows,  # pointers [ROWS, 1] to rows of `ins` numbers
    column,  # int64 [COLUMNS]
    codes,
    scales,
    zeros,
    is_row,
    is_column,
    ins,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: each row times each column."""
    per_byte: tl.constexpr = 2 if CODE == E2M1 or CODE == INT4 else 1  # noqa: SIM109 - the compiler has no `in`
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    num_bytes = tl.cdiv(ins, per_byte)
    for start in range(0, ins, INPUTS):
        place, byte = start + tl.arange(0, INPUTS), start // per_byte + tl.arange(0, INPUTS // per_byte)
        a = tl.load(rows + place, mask=is_row[:, None] & (place < ins), other=0.0)
        is_code = is_column[:, None] & (byte < num_bytes)
        stored = tl.load(codes + column[:, None] * num_bytes + byte, mask=is_code, other=0)
        if per_byte == 2:
            stored = tl.interleave(stored & 15, stored >> 4)
        group = column * num_groups + start // group_size
        zero = tl.full([COLUMNS], 8 if CODE == INT4 else 128, tl.int16)
        if HAS_ZEROS:
            zero = tl.load(zeros + group, mask=is_column, other=0).to(tl.int16)
        b = _numbers(stored, zero, CODE).to(rows.dtype.element_ty)
        part = dot(a, tl.trans(b), tl.zeros([ROWS, COLUMNS], tl.float32))
        sums += part * _scale(tl.load(scales + group, mask=is_column, other=0), CODE)[None, :]
    return sums


@triton.jit
def _numbers(codes, zero, CODE: tl.constexpr):
    """What codes [COLUMNS, INPUTS] stand for, apart from an exponent; see `_scale`."""
    wide = codes.to(tl.int16)
    if CODE == E4M3:  # of float16 only the exponent is larger, by 8
        numbers = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    elif CODE == E2M1:  # likewise, by 14
        numbers = ((wide & 8) << 12 | (wide & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        numbers = (wide - zero[:, None]).to(tl.float32)
    return numbers


@triton.jit
def _scale(stored, CODE: tl.constexpr):
    """float32 scales, with the exponents that `_numbers` leaves out."""
    if stored.dtype == tl.uint8:  # 2^(stored - 127), of which the smallest is no normal number
        scale = tl.where(stored == 0, 0x400000, stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale * (256.0 if CODE == E4M3 else 16384.0 if CODE == E2M1 else 1.0)
