"""Triton kernels for layers with states; `specray.ops.gpu.states` calls them. `specray.ops.states` has the terms.

Arithmetic is float32. A row's result depends on the rows of its path alone, which are computed in their order.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import wait_for_kernels_before


@triton.jit
def convolve_rows(
    x,  # [T, size]
    out,  # [T, size]
    pool,  # [slots, WIDTH - 1, size]
    weights,  # float32 [WIDTH, size]
    bias,  # float32 [size]; unused without HAS_BIAS
    requests,  # int64 [T]
    slots,  # int64 [R]
    is_fresh,  # int64 [R]
    parents,  # int64 [T]
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    request = tl.load(requests + row)
    window = pool + tl.load(slots + request) * (WIDTH - 1) * size + column
    is_kept = is_column & (tl.load(is_fresh + request) == 0)
    sums = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_column, other=0.0)
    at = row  # below 0: so many inputs before the request's first row
    for step in tl.static_range(WIDTH):
        here = tl.load(x + at * size + column, mask=is_column & (at >= 0), other=0.0).to(tl.float32)
        before = tl.load(window + (WIDTH - 1 + at) * size, mask=is_kept & (at < 0), other=0.0).to(tl.float32)
        weight = tl.load(weights + (WIDTH - 1 - step) * size + column, mask=is_column, other=0.0)
        sums += (here + before) * weight
        if step < WIDTH - 1:
            parent = tl.load(parents + at, mask=at >= 0, other=0)
            at = tl.where(at >= 0, parent, at - 1)
    if HAS_SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    tl.store(out + row * size + column, sums.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def keep_windows(
    x,  # [T, size]
    pool,  # [slots, WIDTH - 1, size]
    starts,  # int64 [R + 1]: the windows of each request in what follows, its slot's last
    kept,  # int64: rows that windows end with
    targets,  # int64: rows of the pool that receive them
    firsts,  # int64 [R]
    slots,  # int64 [R]
    is_fresh,  # int64 [R]
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    request, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    first = tl.load(firsts + request)
    window = pool + tl.load(slots + request) * (WIDTH - 1) * size + column
    is_kept = is_column & (tl.load(is_fresh + request) == 0)
    for index in range(tl.load(starts + request), tl.load(starts + request + 1)):
        last = tl.load(kept + index)
        target = pool + tl.load(targets + index) * (WIDTH - 1) * size + column
        for step in tl.static_range(WIDTH - 1):
            # A window may move inside itself: places are read before they are written.
            at = last - first - (WIDTH - 2) + step
            here = tl.load(x + (first + at) * size + column, mask=is_column & (at >= 0), other=0.0)
            before = tl.load(window + (WIDTH - 1 + at) * size, mask=is_kept & (at < 0), other=0.0)
            tl.store(target + step * size, tl.where(at >= 0, here, before), mask=is_column)


@triton.jit
def run_delta_rule(
    qkv,  # [T, channels]
    a,  # [T, HEADS]
    b,  # [T, HEADS]
    seen,  # float32 [T, HEADS, V_DIM]: the results
    pool,  # float32 [slots, HEADS, K_DIM, V_DIM]
    rates,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    starts,  # int64 [R + 1]: the steps of each request in what follows
    rows,  # int64: known rows, then the path to each draft from the last known row
    restarts,  # int64: whether a step continues the last known row instead of the step before
    copies,  # int64 [T]
    num_known,  # int64 [R]
    slots,  # int64 [R]
    is_fresh,  # int64 [R]
    beta_scale,
    HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A head of a request, BLOCK columns of its matrix.

    Drafts compute their paths again, which is cheaper than matrices in memory; one loop gives all rows the same bits.
    """
    wait_for_kernels_before(EARLY)
    request, head = tl.program_id(0), tl.program_id(1)
    key, column = tl.arange(0, K_PADDED), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < K_DIM, column < V_DIM
    is_cell = is_key[:, None] & is_column[None, :]
    cell = (head * K_DIM + key[:, None]) * V_DIM + column[None, :]
    matrix = HEADS * K_DIM * V_DIM
    slot = tl.load(slots + request)
    is_kept = is_cell & (tl.load(is_fresh + request) == 0)
    state = tl.load(pool + slot * matrix + cell, mask=is_kept, other=0.0)
    known = state  # behind the last known row so far
    rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
    keys = head // (HEADS // K_HEADS) * K_DIM + key
    values = 2 * K_HEADS * K_DIM + head * V_DIM + column
    first, count = tl.load(starts + request), tl.load(num_known + request)
    for step in range(first, tl.load(starts + request + 1)):
        row = tl.load(rows + step)
        vectors = qkv + row * (2 * K_HEADS * K_DIM + HEADS * V_DIM)
        q = tl.load(vectors + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(vectors + K_HEADS * K_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(vectors + values, mask=is_column, other=0.0).to(tl.float32)
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) / tl.sqrt(float(K_DIM))
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        x = tl.load(a + row * HEADS + head).to(tl.float32) + bias
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        beta = beta_scale / (1.0 + tl.exp(-tl.load(b + row * HEADS + head).to(tl.float32)))
        state = tl.where(tl.load(restarts + step) != 0, known, state) * tl.exp(rate * softplus)
        change = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * change[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(seen + (row * HEADS + head) * V_DIM + column, result, mask=is_column)
        is_known = step - first < count
        known = tl.where(is_known, state, known)
        copy = tl.load(copies + row)
        tl.store(pool + copy * matrix + cell, state, mask=is_cell & is_known & (copy >= 0))
    tl.store(pool + slot * matrix + cell, known, mask=is_cell & (count > 0))


@triton.jit
def norm_and_gate(
    seen,  # float32 [T * heads, SIZE]
    z,  # [T * heads, SIZE]
    out,  # [T * heads, SIZE]
    weight,  # float32 [SIZE]
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    values = tl.load(seen + place, mask=is_column, other=0.0)
    gate = tl.load(z + place, mask=is_column, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    values = values * factor * tl.load(weight + column, mask=is_column, other=0.0) * gate / (1.0 + tl.exp(-gate))
    tl.store(out + place, values.to(out.dtype.element_ty), mask=is_column)
