"""Paged attention with Triton: prompt chunks, decoding and draft trees in one kernel.

A query's result depends on its own position and keys alone. It reads its keys in the order of their positions, in
blocks of KEYS and chunks of CHUNK positions counted from 0, and a node of a tree reads its ancestors' keys as if the
path were committed. So the same token has the same bits alone, in a batch, in a tree and in a prompt chunk, as far as
the tensor cores round a row alike in tiles of different heights.

A tile has one query or several consecutive ones of a request, with the GROUP heads that share a KV head. Nodes of a
tree share the blocks before it, and then each reads the blocks of its own path. Where the path of one goes through all
others, as in a chain, they share these too. The chunks of a tile may be computed by one program or shared among several
(SPLIT); then `merge_chunks` combines them with the same arithmetic.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import dot, from_float8, start_of, wait_for_kernels_before

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


@triton.jit
def _tile_of(tiles, rows, prefix_lens, row_width, QUERIES: tl.constexpr, PADDED: tl.constexpr):
    """A program's tile: (first query, number of queries, row of `kv_slots`, a position, first node or -1, partials).

    The position is that of the first query or, of nodes, of the first keys of their paths. Its partial sums are those
    from number `partials` on of each chunk.
    """
    if PADDED:
        of_row = (row_width + QUERIES - 1) // QUERIES
        place = tl.program_id(0) % of_row * QUERIES
        first, count = tl.program_id(0) // of_row * row_width + place, tl.minimum(QUERIES, row_width - place)
        request, base, node = tl.load(rows + first), tl.load(prefix_lens + first).to(tl.int32), first.to(tl.int64)
        partials = first
    else:
        tile = tiles + tl.program_id(0) * 6
        first, count, request = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        base, node, partials = tl.load(tile + 3), tl.load(tile + 4).to(tl.int64), tl.load(tile + 5)
    return first, count, request, base, node, partials


@triton.jit
def _ends_of(paths, path_lengths, node, is_node, paths_width, PATHS: tl.constexpr):
    """(length of each node's path, its own KV slot where a tile has several nodes).

    There, a path of padding, whose own slot is KV slot 0, counts as of length 1.
    """
    length = tl.load(path_lengths + node, mask=is_node, other=1).to(tl.int32)
    own = length
    if PATHS > 1:
        own = tl.load(paths + node * paths_width + length - 1, mask=is_node, other=0)
        length = tl.where(own != 0, length, 1)
    return length, own


@triton.jit
def tile_rows(
    tiles,  # int32 [tiles, 6]: see `specray.ops.gpu.attention`
    lens,  # int64 [R]: queries of each row, which follow each other row by row
    rows,  # int64 [T], like the next: see PaddedBatch
    prefix_lens,
    num_rows,  # R
    num_queries,  # T
    num_tiles,
    QUERIES: tl.constexpr,  # most of a tile
):
    """The tiles of one row, behind those of the rows before it. Padding is row R, and empty tiles follow its own."""
    row = tl.program_id(0)
    first, tile = start_of(lens, row, 1), start_of(lens, row, QUERIES)
    count = tl.load(lens + row, mask=row < num_rows, other=0)
    count = tl.where(row < num_rows, count, num_queries - first)
    for begin in range(0, count, QUERIES):
        out = tiles + (tile + begin // QUERIES) * 6
        tl.store(out, (first + begin).to(tl.int32))
        tl.store(out + 1, tl.minimum(QUERIES, count - begin).to(tl.int32))
        tl.store(out + 2, tl.load(rows + first).to(tl.int32))
        tl.store(out + 3, tl.load(prefix_lens + first).to(tl.int32))
        tl.store(out + 4, (first + begin).to(tl.int32))
        tl.store(out + 5, (first + begin).to(tl.int32))
    tile += (count + QUERIES - 1) // QUERIES
    for empty in range(tl.where(row < num_rows, num_tiles, tile), num_tiles):
        tl.store(tiles + empty * 6 + tl.arange(0, 8), 0, mask=tl.arange(0, 8) < 6)


@triton.jit(do_not_specialize=["row_width", "num_partials", "slots_width", "paths_width"])  # they change at each step
def attend_tiles(
    out,  # [T, heads, DIM]; unused with SPLIT
    partial_mixed,  # float32 [chunks, num_partials, heads, DIM]; unused without SPLIT, like the next
    partial_sums,  # float32 [chunks, num_partials, heads, 2]: largest score and sum of weights
    q,  # [T, heads, DIM], contiguous in its last two dimensions
    pool,  # one layer [slots, 2, KV_HEADS, DIM], contiguous in its last three dimensions; with MANTISSA uint8
    tiles,  # int32 [tiles, 6]: see `specray.ops.gpu.attention`; unused with PADDED
    rows,  # int64 [T], with PADDED: see PaddedBatch, whose query t is node t
    prefix_lens,  # int64 [T], with PADDED
    kv_slots,  # int32 or int64 [any, slots_width]: row `request` of a tile
    paths,  # int64 [nodes, paths_width]: KV slots of a node and its ancestors by depth; unused without PATHS
    path_lengths,  # int64 [nodes]; likewise
    sinks,  # float32 [heads]; unused without HAS_SINKS
    row_width,  # with PADDED, consecutive queries of a row
    num_partials,  # queries of all tiles
    q_stride,
    slot_stride,  # of the pool
    slots_width,
    paths_width,
    scale,  # of scores, times log2(e); with CAPPED, divided by the cap
    cap,  # with CAPPED, times log2(e)
    QUERIES: tl.constexpr,  # most of a tile
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
    PATHS: tl.constexpr,  # most nodes of a tile: 0, 1, or 2 for any number
    MANTISSA: tl.constexpr,  # of float8; 0: the pool has the type of q
    CONVERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    kv_head = tl.program_id(1)
    first, count, request, base, node, partials = _tile_of(tiles, rows, prefix_lens, row_width, QUERIES, PADDED)
    row = tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_row, is_node = query < count, node >= 0
    position, last_position = base + query, base + count - 1
    first_position = base
    last, last_length = 0, 0  # of the query whose path is read for all
    first_own = 0  # position from which on each query has blocks of its own
    if PATHS == 1:
        last_length, _ = _ends_of(paths, path_lengths, node, is_node, paths_width, PATHS)
        first_position = tl.where(is_node, base + last_length - 1, base)
        position, last_position = first_position + query, first_position + count - 1
    if PATHS > 1:
        lengths, own = _ends_of(paths, path_lengths, node + query, is_row & is_node, paths_width, PATHS)
        position = tl.where(is_node, base + lengths - 1, position)
        first_position = tl.min(tl.where(is_row, position, 1 << 30), 0)
        last_position = tl.max(tl.where(is_row, position, 0), 0)
        last = tl.max(tl.where(own != 0, query, 0), 0)
        last_length = tl.max(tl.where(query == last, lengths, 0), 0)
        is_above = (own != 0) & (lengths <= last_length)
        seen_by_last = tl.load(paths + (node + last) * paths_width + lengths - 1, mask=is_above, other=0)
        shares_path = tl.max((own != seen_by_last).to(tl.int32), 0) == 0
        first_own = tl.where(is_node & (shares_path == 0), base // KEYS * KEYS, last_position + 1)

    column = tl.arange(0, DIM_PADDED)
    is_column = column < DIM
    q_places = (first + query).to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + column
    queries = tl.load(q + q_places, mask=is_row[:, None] & is_column, other=0.0)

    begin, end = _chunks(first_position, last_position, WINDOW, CHUNK)
    end = tl.where(count > 0, end, 0)
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
        start = tl.maximum(chunk * CHUNK, first_block)
        num_blocks = (tl.minimum((chunk + 1) * CHUNK, last_position + 1) - start + KEYS - 1) // KEYS
        num_shared = num_blocks
        if PATHS > 1:
            num_shared = tl.minimum(tl.maximum(first_own - start + KEYS - 1, 0) // KEYS, num_blocks)
            num_blocks = num_shared + (num_blocks - num_shared) * count
        for block in range(num_blocks):
            first_key, member, stop = start + block * KEYS, last, base + last_length
            is_updated = is_row
            if PATHS > 1:
                is_shared, rest = block < num_shared, block - num_shared
                first_key = start + tl.where(is_shared, block, num_shared + rest // count) * KEYS
                member = tl.where(is_shared, last, rest % count)
                length = tl.load(path_lengths + node + member, mask=~is_shared, other=0).to(tl.int32)
                stop = base + tl.where(is_shared, last_length, length)
                is_updated = is_shared | (query == member)
            key = first_key + tl.arange(0, KEYS)
            is_key = key <= last_position
            is_own = is_node & (key >= base)
            slot = tl.load(kv_slots + request * slots_width + key, mask=is_key & ~is_own, other=0).to(tl.int64)
            if PATHS > 0:
                is_key = is_key & (~is_own | (key < stop))
                own_slot = tl.load(paths + (node + member) * paths_width + key - base, mask=is_key & is_own, other=0)
                slot = tl.where(is_own, own_slot, slot)
            kv_places = slot[:, None] * slot_stride + kv_head * DIM + column
            is_loaded = is_key[:, None] & is_column
            keys = tl.load(pool + kv_places, mask=is_loaded, other=0.0)
            values = tl.load(pool + kv_places + KV_HEADS * DIM, mask=is_loaded, other=0.0)
            if MANTISSA:
                keys = from_float8(keys, queries.dtype, MANTISSA, CONVERTS)
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
            new_total = tl.fma(chunk_total, before, tl.sum(weights, 1))
            if MANTISSA:  # late: converted with the keys, the values would take registers that there are not
                values = from_float8(values, queries.dtype, MANTISSA, CONVERTS)
            new_mixed = dot(weights.to(values.dtype), values, chunk_mixed * before[:, None])
            if PATHS > 1:  # nothing of other queries' paths, even if it is not finite
                new_top = tl.where(is_updated, new_top, chunk_top)
                new_total = tl.where(is_updated, new_total, chunk_total)
                new_mixed = tl.where(is_updated[:, None], new_mixed, chunk_mixed)
            chunk_top, chunk_total, chunk_mixed = new_top, new_total, new_mixed
        if SPLIT:
            place = (chunk * num_partials + partials + query).to(tl.int64) * heads + head
            tl.store(partial_sums + place * 2, chunk_top, mask=is_row)
            tl.store(partial_sums + place * 2 + 1, chunk_total, mask=is_row)
            tl.store(partial_mixed + place[:, None] * DIM + column, chunk_mixed, mask=is_row[:, None] & is_column)
        else:
            top, total, mixed = _merge(top, total, mixed, chunk_top, chunk_total, chunk_mixed)

    if not SPLIT:
        place = (first + query).to(tl.int64) * heads + head
        result = mixed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + place[:, None] * DIM + column, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit(do_not_specialize=["row_width", "num_partials", "paths_width"])
def merge_chunks(
    out,
    partial_mixed,
    partial_sums,
    tiles,
    rows,
    prefix_lens,
    paths,
    path_lengths,
    sinks,
    row_width,
    num_partials,
    paths_width,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED: tl.constexpr,
    PATHS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine the chunks of one query of a tile, all heads at once; the arguments are those of `attend_tiles`."""
    wait_for_kernels_before(EARLY)
    query = tl.program_id(1)
    first, count, _, base, node, partials = _tile_of(tiles, rows, prefix_lens, row_width, QUERIES, PADDED)
    if query < count:
        position = base + query
        if PATHS > 0:
            length, _ = _ends_of(paths, path_lengths, node + query, node >= 0, paths_width, PATHS)
            position = tl.where(node >= 0, base + length - 1, position)
        begin, end = _chunks(position, position, WINDOW, CHUNK)
        head, column = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
        is_head, is_column = head < HEADS, column < DIM
        top, total = _start(sinks, head, is_head, HAS_SINKS)
        mixed = tl.zeros([HEADS_PADDED, DIM_PADDED], tl.float32)
        for chunk in range(begin, end):
            place = (chunk * num_partials + partials + query).to(tl.int64) * HEADS + head
            chunk_top = tl.load(partial_sums + place * 2, mask=is_head, other=float("-inf"))
            chunk_total = tl.load(partial_sums + place * 2 + 1, mask=is_head, other=0.0)
            is_value = is_head[:, None] & is_column
            chunk_mixed = tl.load(partial_mixed + place[:, None] * DIM + column, mask=is_value, other=0.0)
            top, total, mixed = _merge(top, total, mixed, chunk_top, chunk_total, chunk_mixed)
        result = mixed / tl.where(is_head, total, 1.0)[:, None]
        place = ((first + query).to(tl.int64) * HEADS + head)[:, None] * DIM + column
        tl.store(out + place, result.to(out.dtype.element_ty), mask=is_head[:, None] & is_column)
