"""Paged attention with Triton: prompt chunks, decoding and draft trees in one kernel.

A query's result depends on its own position and keys alone. It reads its keys in the order of their positions, in
blocks of KEYS and chunks of CHUNK positions counted from 0, and a node of a tree reads its ancestors' keys as if the
path were committed. So the same token has the same bits alone, in a batch, in a tree and in a prompt chunk, as far as
the tensor cores round a row alike in tiles of different heights.

A tile is one query or several consecutive ones of a request, with the GROUP heads that share a KV head. Its chunks may
be computed by one program or shared among several (SPLIT); then `merge_chunks` combines them with the same arithmetic.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import dot, from_float8, wait_for_kernels_before

KEYS = 64  # positions of a block
CHUNK = 512  # positions of a chunk


@triton.jit
def _merge(top, total, mixed, chunk_top, chunk_total, chunk_mixed):
    """The softmax state over two consecutive runs of keys. Explicit FMAs, so that every kernel rounds alike."""
    new_top = tl.maximum(top, chunk_top)
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    before, added = tl.exp2(top - reference), tl.exp2(chunk_top - reference)
    total = tl.fma(total, before, chunk_total * added)
    mixed = tl.fma(mixed, before[:, None] + tl.zeros_like(mixed), chunk_mixed * added[:, None])
    return new_top, total, mixed


@triton.jit
def _capped(scores, cap):
    """cap * tanh(scores), without a large number."""
    small = tl.exp2(tl.abs(scores) * -2.885390081777927)  # exp(-2 |score|)
    size = cap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -size, size)


@triton.jit
def _start(sinks, head, is_head, HAS_SINKS: tl.constexpr):
    """The softmax state before any key: (largest score, sum). A sink is as a key whose value is zero."""
    top = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634  # log2(e)
        total += 1.0
    return top, total


@triton.jit
def _chunks(first_position, last_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The chunks that queries at these positions attend to: the first one, and the one behind the last."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // CHUNK
    return begin, last_position // CHUNK + 1


@triton.jit(do_not_specialize=["num_tokens", "slots_width", "paths_width"])  # they change from step to step
def attend_tiles(
    out,  # [T, heads, DIM]; unused with SPLIT
    partial_mixed,  # float32 [chunks, T, heads, DIM]; unused without SPLIT
    partial_sums,  # float32 [chunks, T, heads, 2]: largest score and sum of weights
    q,  # [T, heads, DIM], contiguous in its last two dimensions
    pool,  # one layer [slots, 2, KV_HEADS, DIM], contiguous in its last three dimensions; with MANTISSA uint8
    tiles,  # int32 [tiles, 5]: see `specray.ops.gpu.attention`; unused with PADDED
    rows,  # int64 [T], with PADDED: see PaddedBatch, whose query t is tile t and node t
    prefix_lens,  # int64 [T], with PADDED
    kv_slots,  # int32 or int64 [any, slots_width]: row `request` of a tile
    paths,  # int64 [nodes, paths_width]: KV slots of a node and its ancestors by depth
    path_lengths,  # int64 [nodes]
    sinks,  # float32 [heads]; unused without HAS_SINKS
    num_tokens,  # T
    q_stride,
    slot_stride,  # of the pool
    slots_width,
    paths_width,
    scale,  # of scores, times log2(e); with CAPPED, divided by the cap
    cap,  # with CAPPED, times log2(e)
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PADDED: tl.constexpr,
    MANTISSA: tl.constexpr,  # of float8; 0: the pool has the type of q
    CONVERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    kv_head = tl.program_id(1)
    if PADDED:
        first, count, node = tl.program_id(0), 1, tl.program_id(0).to(tl.int64)
        request, base = tl.load(rows + node), tl.load(prefix_lens + node).to(tl.int32)
    else:
        tile = tiles + tl.program_id(0) * 5
        first, count, request = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        base, node = tl.load(tile + 3), tl.load(tile + 4).to(tl.int64)
    is_node = node >= 0
    # A node's keys from position `base` on are its path; a causal query's all are the request's.
    path_length = tl.load(path_lengths + node, mask=is_node, other=0).to(tl.int32)
    first_position = tl.where(is_node, base + path_length - 1, base)
    last_position = first_position + count - 1

    row = tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_row = query < count
    position = first_position + query
    column = tl.arange(0, DIM_PADDED)
    is_column = column < DIM
    q_places = (first + query).to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + column
    queries = tl.load(q + q_places, mask=is_row[:, None] & is_column, other=0.0)

    begin, end = _chunks(first_position, last_position, WINDOW, CHUNK)
    first_block = 0  # earlier ones are outside all windows: they would add zeros
    if WINDOW > 0:
        first_block = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    step = 1
    if SPLIT:
        begin += tl.program_id(2)
        step = tl.num_programs(2)
    heads = GROUP * KV_HEADS
    top, total = _start(sinks, head, is_row, HAS_SINKS)
    mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for chunk in range(begin, end, step):
        chunk_top = tl.full([ROWS], float("-inf"), tl.float32)
        chunk_total = tl.zeros([ROWS], tl.float32)
        chunk_mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
        stop = tl.minimum((chunk + 1) * CHUNK, last_position + 1)
        for start in range(tl.maximum(chunk * CHUNK, first_block), stop, KEYS):
            key = start + tl.arange(0, KEYS)
            is_key = key <= last_position
            is_own = is_node & (key >= base)
            slot = tl.load(kv_slots + request * slots_width + key, mask=is_key & ~is_own, other=0).to(tl.int64)
            own = tl.load(paths + node * paths_width + key - base, mask=is_key & is_own, other=0)
            slot = tl.where(is_own, own, slot)
            kv_places = slot[:, None] * slot_stride + kv_head * DIM + column
            is_loaded = is_key[:, None] & is_column
            keys = tl.load(pool + kv_places, mask=is_loaded, other=0.0)
            values = tl.load(pool + kv_places + KV_HEADS * DIM, mask=is_loaded, other=0.0)
            if MANTISSA:
                keys = from_float8(keys, queries.dtype, MANTISSA, CONVERTS)
                values = from_float8(values, queries.dtype, MANTISSA, CONVERTS)
            scores = dot(queries, tl.trans(keys), tl.zeros([ROWS, KEYS], tl.float32)) * scale
            if CAPPED:
                scores = _capped(scores, cap)
            is_seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_top = tl.maximum(chunk_top, tl.max(scores, 1))
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - reference[:, None])
            before = tl.exp2(chunk_top - reference)
            chunk_total = tl.fma(chunk_total, before, tl.sum(weights, 1))
            chunk_mixed = chunk_mixed * before[:, None]
            chunk_mixed = dot(weights.to(values.dtype), values, chunk_mixed)
            chunk_top = new_top
        if SPLIT:
            place = (chunk * num_tokens + (first + query).to(tl.int64)) * heads + head
            tl.store(partial_sums + place * 2, chunk_top, mask=is_row)
            tl.store(partial_sums + place * 2 + 1, chunk_total, mask=is_row)
            tl.store(partial_mixed + place[:, None] * DIM + column, chunk_mixed, mask=is_row[:, None] & is_column)
        else:
            top, total, mixed = _merge(top, total, mixed, chunk_top, chunk_total, chunk_mixed)

    if not SPLIT:
        place = (first + query).to(tl.int64) * heads + head
        result = mixed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + place[:, None] * DIM + column, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_chunks(
    out,
    partial_mixed,
    partial_sums,
    tiles,  # of one query each
    prefix_lens,
    path_lengths,
    sinks,
    num_tokens,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine the chunks of one query, all heads at once."""
    wait_for_kernels_before(EARLY)
    if PADDED:
        query = tl.program_id(0).to(tl.int64)
        node, position = query, tl.load(prefix_lens + query).to(tl.int32)
    else:
        tile = tiles + tl.program_id(0) * 5
        query, position = tl.load(tile).to(tl.int64), tl.load(tile + 3)
        node = tl.load(tile + 4).to(tl.int64)
    position += tl.load(path_lengths + node, mask=node >= 0, other=1).to(tl.int32) - 1
    begin, end = _chunks(position, position, WINDOW, CHUNK)
    head, column = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    is_head, is_column = head < HEADS, column < DIM
    top, total = _start(sinks, head, is_head, HAS_SINKS)
    mixed = tl.zeros([HEADS_PADDED, DIM_PADDED], tl.float32)
    for chunk in range(begin, end):
        place = (chunk * num_tokens + query) * HEADS + head
        chunk_top = tl.load(partial_sums + place * 2, mask=is_head, other=float("-inf"))
        chunk_total = tl.load(partial_sums + place * 2 + 1, mask=is_head, other=0.0)
        is_value = is_head[:, None] & is_column
        chunk_mixed = tl.load(partial_mixed + place[:, None] * DIM + column, mask=is_value, other=0.0)
        top, total, mixed = _merge(top, total, mixed, chunk_top, chunk_total, chunk_mixed)
    result = mixed / tl.where(is_head, total, 1.0)[:, None]
    place = (query * HEADS + head)[:, None] * DIM + column
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_head[:, None] & is_column)
