"""Products of rows with a matrix, or with their own expert's, whose sums do not depend on the other rows, with Triton.

All tiles of the result have one size, and a sum runs over the inputs in order, in steps of INPUTS. Every row of every
product with a matrix therefore goes through the same instructions in the same order, however many rows there are. For a
mixture of experts, rows are grouped by expert in blocks of ROWS, which `specray.ops.gpu.experts` makes.

CODE says what a matrix holds: numbers, or codes of a QuantisedWeight, which are decoded in registers. A step then lies
within one group of inputs: it adds up products with codes, which are exact in any type of activations, and multiplies
their sum with the group's scales.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import dot

NUMBERS: tl.constexpr = tl.constexpr(-1)
E4M3: tl.constexpr = tl.constexpr(0)
E2M1: tl.constexpr = tl.constexpr(1)
INT8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)


@triton.jit
def multiply_rows(
    out,  # [num_rows, outs]
    x,  # [num_rows, ins], contiguous
    weight,  # [outs, ins], contiguous; uint8 [outs, ins / 2] of codes of 4 bits
    scales,  # of codes, [outs, num_groups]
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
        sums = _products(
            x + row.to(tl.int64)[:, None] * ins,
            column.to(tl.int64),
            weight,
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
def multiply_pairs(
    out,  # [pairs, outs]
    x,  # [rows, ins]; pair p reads row p // SHARE
    weight,  # of all experts' outputs, one below the other, like scales, zeros and bias
    scales,
    zeros,
    bias,
    block_experts,  # int32 [blocks], -1: no rows
    block_pairs,  # int32 [blocks, ROWS], num_pairs: no row
    num_pairs,
    outs,  # of an expert
    ins,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Each pair of a row and an expert: the row times the expert's matrix."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(block_pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_pair = pair < num_pairs
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < outs
        sums = _products(
            x + (pair // SHARE)[:, None] * ins,
            expert * outs + column,
            weight,
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
        if HAS_BIAS:
            sums += tl.load(bias + expert * outs + column, mask=is_column, other=0.0).to(tl.float32)
        places = pair[:, None] * outs + column
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column)


@triton.jit
def _products(
    rows,  # pointers [ROWS, 1] to rows of `ins` numbers
    column,  # int64 [COLUMNS]
    weight,
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
    width = tl.cdiv(ins, per_byte)
    for start in range(0, ins, INPUTS):
        place, stored_place = start + tl.arange(0, INPUTS), start // per_byte + tl.arange(0, INPUTS // per_byte)
        a = tl.load(rows + place, mask=is_row[:, None] & (place < ins), other=0.0)
        is_stored = is_column[:, None] & (stored_place < width)
        stored = tl.load(weight + column[:, None] * width + stored_place, mask=is_stored, other=0)
        if CODE == NUMBERS:
            sums = dot(a, tl.trans(stored), sums)
        else:
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
