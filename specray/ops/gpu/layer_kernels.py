"""Triton kernels for the element-wise operations of decoder layers; `specray.ops.gpu.layers` calls them.

Arithmetic is float32. A program has one token, or one head of it, so a token's result does not depend on the others.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import to_float8, wait_for_kernels_before


@triton.jit
def norm_rows(
    x, residual, out, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_kernels_before(EARLY)
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    values = tl.load(x + place, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + place, mask=is_column, other=0.0).to(tl.float32)
        # The norm reads the sum as it is stored, like the next layer that reads it.
        stored = values.to(x.dtype.element_ty)
        tl.store(x + place, stored, mask=is_column)
        values = stored.to(tl.float32)
    scaled = norm_values(values, weight, column, is_column, eps, SIZE)
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def norm_values(values, weight, column, is_column, eps, SIZE: tl.constexpr):
    """float32 `values` of a row, normed."""
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    return values * factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)


@triton.jit
def join_rows(
    joined,  # [T, 2 * SIZE]
    normed,  # [T, SIZE]: the second half again; unused without KEEPS
    token_ids,  # int64 [T]
    embedding,  # [vocabulary, SIZE]
    states,  # [T, SIZE]
    token_weight,
    state_weight,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEEPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """[norm of the token's embedding, norm of the state]"""
    wait_for_kernels_before(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_column = column < SIZE
    row = tl.load(token_ids + token)
    values = tl.load(embedding + row * SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    scaled = norm_values(values, token_weight, column, is_column, eps, SIZE)
    out = joined + token * 2 * SIZE + column
    tl.store(out, scaled.to(joined.dtype.element_ty), mask=is_column)
    values = tl.load(states + token * SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    scaled = norm_values(values, state_weight, column, is_column, eps, SIZE)
    tl.store(out + SIZE, scaled.to(joined.dtype.element_ty), mask=is_column)
    if KEEPS:
        tl.store(normed + token * SIZE + column, scaled.to(normed.dtype.element_ty), mask=is_column)


@triton.jit
def gather_angles(cos, sin, cos_table, sin_table, positions, DIM: tl.constexpr, PADDED: tl.constexpr):
    """cos and sin [T, DIM] of positions int64 [T], from float32 tables [any, DIM]."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_column = column < DIM
    source = tl.load(positions + token) * DIM + column
    place = token * DIM + column
    found = tl.load(cos_table + source, mask=is_column, other=0.0)
    tl.store(cos + place, found.to(cos.dtype.element_ty), mask=is_column)
    found = tl.load(sin_table + source, mask=is_column, other=0.0)
    tl.store(sin + place, found.to(sin.dtype.element_ty), mask=is_column)


@triton.jit
def rotate_head(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    pool,
    slot_mapping,
    slot_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MANTISSA: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF_PADDED)
    is_column = column < DIM // 2
    place = (token * (Q_HEADS + 2 * KV_HEADS) + head) * DIM + column
    first = tl.load(qkv + place, mask=is_column, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + DIM // 2, mask=is_column, other=0.0).to(tl.float32)
    if head < Q_HEADS + KV_HEADS:
        if HAS_NORM:
            factor = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + eps)
            weight = q_norm if head < Q_HEADS else k_norm
            first *= factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
            second *= factor * tl.load(weight + column + DIM // 2, mask=is_column, other=0.0).to(tl.float32)
        angle = token * DIM + column
        cos_first = tl.load(cos + angle, mask=is_column, other=0.0)
        cos_second = tl.load(cos + angle + DIM // 2, mask=is_column, other=0.0)
        sin_first = tl.load(sin + angle, mask=is_column, other=0.0)
        sin_second = tl.load(sin + angle + DIM // 2, mask=is_column, other=0.0)
        rotated = first * cos_first + second * sin_first
        second = second * cos_second + first * sin_second
        first = rotated
    if head < Q_HEADS:
        tl.store(qkv + place, first.to(qkv.dtype.element_ty), mask=is_column)
        tl.store(qkv + place + DIM // 2, second.to(qkv.dtype.element_ty), mask=is_column)
    else:
        # In an attention tile a value counts 0 times for queries that do not attend to it, and 0 * NaN is NaN. So a
        # value that is not finite is stored as zeros, and its key as NaN.
        is_value = head >= Q_HEADS + KV_HEADS
        of_value = place + tl.where(is_value, 0, KV_HEADS * DIM)
        value_first = tl.load(qkv + of_value, mask=is_column, other=0.0).to(tl.float32)
        value_second = tl.load(qkv + of_value + DIM // 2, mask=is_column, other=0.0).to(tl.float32)
        if MANTISSA:  # no infinity
            is_lost = (value_first != value_first) | (value_second != value_second)
        else:
            is_lost = (value_first - value_first != 0.0) | (value_second - value_second != 0.0)
        is_lost = tl.max(is_lost.to(tl.int32), 0) > 0
        first = tl.where(is_lost, tl.where(is_value, 0.0, float("nan")), first)
        second = tl.where(is_lost, tl.where(is_value, 0.0, float("nan")), second)
        slot = tl.load(slot_mapping + token)
        target = slot * slot_stride + (head - Q_HEADS) * DIM + column
        if MANTISSA:
            tl.store(pool + target, to_float8(first, MANTISSA), mask=is_column)
            tl.store(pool + target + DIM // 2, to_float8(second, MANTISSA), mask=is_column)
        else:
            tl.store(pool + target, first.to(pool.dtype.element_ty), mask=is_column)
            tl.store(pool + target + DIM // 2, second.to(pool.dtype.element_ty), mask=is_column)


@triton.jit
def silu_block(gate_up, out, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def quantise_row(
    x,  # [T, SIZE]
    quantised,  # float8 [T, WIDTH]: x / scale, then zeros
    scales,  # float32 [T]
    smallest,
    largest,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A row in float8, whose scale makes its largest magnitude `largest`; magnitudes count as at least `smallest`."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    values = tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), smallest) / largest
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(values / scale, -largest), largest)
    tl.store(quantised + row * WIDTH + column, scaled.to(quantised.dtype.element_ty), mask=column < WIDTH)
