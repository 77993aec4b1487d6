"""Triton kernels that build the input of padded steps and keep their outcome, each in one launch.

Launched by `specray.ops.gpu.steps`. A program has one request. `buffer` is that of `RequestTable`: a row of int32 for
each slot, with token ids from column 0 on, KV slots from `kv_column` on, and the number of tokens at `length_column`.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import place_of, start_of


@triton.jit
def gather_cells(out, buffer, slots, positions, count, row_size, column, BLOCK: tl.constexpr):
    """out int64 [count] = buffer[slots, column + positions]; slots and positions are int64 [count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < count
    slot = tl.load(slots + place, mask=is_place, other=0)
    position = tl.load(positions + place, mask=is_place, other=0)
    cell = tl.load(buffer + slot * row_size + column + position, mask=is_place, other=0)
    tl.store(out + place, cell.to(tl.int64), mask=is_place)


@triton.jit
def load_trees(
    slots,  # int64 [max_rows]: of the padded step, like the next three
    num_nodes,  # int64 [max_rows]
    tokens,  # int64 [max_rows, max_nodes]
    parents,
    new_slots,  # int64 [count]: of the next step, like the next three
    new_num_nodes,  # int64 [count]
    new_tokens,  # int64 [count, width]
    new_parents,
    count,
    width,
    max_nodes,
    padding_slot,
    tokens_stride,
    parents_stride,
    PADDED: tl.constexpr,
):
    """Copy a step's slots and trees; everything behind them becomes padding."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_row = row < count
    tl.store(slots + row, tl.load(new_slots + row, mask=is_row, other=padding_slot))
    tl.store(num_nodes + row, tl.load(new_num_nodes + row, mask=is_row, other=0))
    is_known, is_node = is_row & (node < width), node < max_nodes
    token = tl.load(new_tokens + row * tokens_stride + node, mask=is_known, other=-1)
    parent = tl.load(new_parents + row * parents_stride + node, mask=is_known, other=-1)
    tl.store(tokens + row * max_nodes + node, token, mask=is_node)
    tl.store(parents + row * max_nodes + node, parent, mask=is_node)


@triton.jit
def build_trees(
    token_ids,  # int64 [T], like the next four: the nodes tree by tree, then padding
    positions,
    prefix_lens,
    rows,
    slot_mapping,
    paths,  # int64 [T, WIDTH + 1]
    path_lengths,  # int64 [T]
    kept,  # int64 [B, 2 + WIDTH]: known tokens, the place of the root, and the KV slots of the nodes
    num_tokens,  # T
    buffer,
    slots,  # int64 [B]
    num_nodes,  # int64 [B]
    tokens,  # int64 [B, WIDTH], rows `tree_stride` apart, like the parents
    parents,
    row_size,
    kv_column,
    length_column,
    padding_kv_slot,
    tree_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """See `TorchTable.tree_input`. A node's path are the KV slots of its ancestors and its own, by depth."""
    tree, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot, count = tl.load(slots + tree), tl.load(num_nodes + tree)
    request = buffer + slot * row_size
    length = tl.load(request + length_column).to(tl.int64)
    prefix = tl.maximum(length - 1, 0)
    is_place, is_node = node < WIDTH, node < count
    own = request + kv_column + prefix
    kv_slot = tl.load(own + node, mask=is_place, other=0).to(tl.int64)
    links = parents + tree * tree_stride
    ancestor = tl.load(links + node, mask=is_node & (node > 0), other=-1)
    depth = tl.zeros([PADDED], tl.int64)
    while tl.max(ancestor, 0) >= 0:
        depth += (ancestor >= 0).to(tl.int64)
        ancestor = tl.load(links + ancestor, mask=ancestor > 0, other=-1)
    place = place_of(num_nodes, tree, node, count, WIDTH)
    is_written = is_place & (place < num_tokens)
    tl.store(token_ids + place, tl.load(tokens + tree * tree_stride + node, mask=is_node, other=0), mask=is_written)
    tl.store(positions + place, tl.where(is_node, prefix + depth, 0), mask=is_written)
    tl.store(prefix_lens + place, tl.where(is_node, prefix, 0), mask=is_written)
    tl.store(rows + place, tl.where(is_node, slot, 0), mask=is_written)
    tl.store(slot_mapping + place, tl.where(is_node, kv_slot, padding_kv_slot), mask=is_written)
    tl.store(path_lengths + place, tl.where(is_node, depth + 1, 1), mask=is_written)
    path = paths + place * (WIDTH + 1)
    tl.store(path, tl.zeros([PADDED], tl.int64), mask=is_written & (node >= count))
    step, on_path = tl.where(is_node, depth, -1), node.to(tl.int64)
    while tl.max(step, 0) >= 0:
        is_left = step >= 0
        tl.store(path + step, tl.load(own + on_path, mask=is_left, other=0).to(tl.int64), mask=is_left)
        on_path = tl.load(links + on_path, mask=step > 0, other=0)
        step -= 1
    tl.store(kept + tree * (2 + WIDTH), length)
    tl.store(kept + tree * (2 + WIDTH) + 1, start_of(num_nodes, tree))
    tl.store(kept + tree * (2 + WIDTH) + 2 + node, kv_slot, mask=is_place)


@triton.jit
def commit_tokens(
    buffer,
    report,  # int64 [B, 2 + 2 * WIDTH], a copy of `outcome`
    slots,  # int64 [B]
    outcome,  # int64 [B, 2 + 2 * WIDTH]: see VerifyOutput
    row_size,
    length_column,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Append the accepted tokens to the requests, and report them. Padding rows append none."""
    row, depth = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    found, is_depth = outcome + row * (2 + 2 * WIDTH), depth < WIDTH
    count = tl.load(found)
    request = buffer + tl.load(slots + row) * row_size
    length = tl.load(request + length_column)
    token = tl.load(found + 2 + depth, mask=is_depth, other=0)
    node = tl.load(found + 2 + WIDTH + depth, mask=is_depth, other=0)
    tl.store(request + length + depth, token.to(tl.int32), mask=depth < count)
    if count > 0:
        tl.store(request + length_column, length + count.to(tl.int32))
    copy = report + row * (2 + 2 * WIDTH)
    tl.store(copy, count)
    tl.store(copy + 1, count)
    tl.store(copy + 2 + depth, token, mask=is_depth)
    tl.store(copy + 2 + WIDTH + depth, node, mask=is_depth)


@triton.jit
def build_extend(
    token_ids,  # int64 [T], like the next five, with WIDTH tokens for each request
    positions,
    prefix_lens,
    rows,
    slot_mapping,
    places,
    paths,  # int64 [T, WIDTH]
    path_lengths,  # int64 [T]
    ends,  # int64 [B]: positions of the last known tokens
    last,  # int64 [B]: the places of the last tokens among the T
    roots,  # int64 [B]: the last known tokens
    buffer,
    slots,  # int64 [B]
    counts,  # int64 [B], `counts_stride` apart: committed tokens
    states,  # int64 [B, at least WIDTH], rows `states_stride` apart: places of their hidden states
    row_size,
    kv_column,
    length_column,
    padding_kv_slot,
    counts_stride,
    states_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """See `padded_extend`. Tokens past a request's own write to the padding KV slot."""
    row, depth = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot, count = tl.load(slots + row), tl.load(counts + row * counts_stride)
    request = buffer + slot * row_size
    end = tl.maximum(tl.load(request + length_column).to(tl.int64) - 1, 0)
    start, is_depth, is_token = end - count, depth < WIDTH, depth < count
    position = tl.where(is_token, start + depth, 0)
    kv_slot = tl.load(request + kv_column + position, mask=is_depth, other=0).to(tl.int64)
    token = tl.load(request + position + 1, mask=is_depth, other=0).to(tl.int64)
    state = tl.load(states + row * states_stride + depth, mask=is_depth, other=0)
    place, zeros = row * WIDTH + depth, tl.zeros([PADDED], tl.int64)
    tl.store(token_ids + place, token, mask=is_depth)
    tl.store(positions + place, position, mask=is_depth)
    tl.store(prefix_lens + place, start + zeros, mask=is_depth)
    tl.store(rows + place, slot + zeros, mask=is_depth)
    tl.store(slot_mapping + place, tl.where(is_token, kv_slot, padding_kv_slot), mask=is_depth)
    tl.store(places + place, state, mask=is_depth)
    tl.store(path_lengths + place, depth.to(tl.int64) + 1, mask=is_depth)
    seen = tl.where(is_token, kv_slot, 0)
    for query in range(WIDTH):
        tl.store(paths + (row * WIDTH + query) * WIDTH + depth, seen, mask=is_depth)
    tl.store(ends + row, end)
    tl.store(last + row, row * WIDTH + tl.maximum(count - 1, 0))
    tl.store(roots + row, tl.load(request + end).to(tl.int64))


@triton.jit
def take_trees(
    tokens,  # int64 [B, WIDTH]: the trees of the step, like the next two
    parents,
    num_nodes,  # int64 [B]
    report,  # int64 [2, B]: nodes, 0 if the drafter's logits were not finite; whether the tree is a chain
    pending_tokens,  # int64 [slots, WIDTH], like the parents
    pending_parents,
    pending_nodes,  # int64 [slots], -1: no tree
    pending_scores,  # float32 [slots, WIDTH]
    least,  # float32 [B]
    slots,  # int64 [B]
    roots,  # int64 [B]
    most,  # int64 [B]: nodes of each tree
    num_rows,
    vocab_size,
    CUTS: tl.constexpr,  # nodes of a score below `least`; the report is float32 [3 + WIDTH, B] then
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """See `PendingTrees.take`: a tree that is invalid, or of another root, becomes its root."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot, root, is_place = tl.load(slots + row), tl.load(roots + row), node < WIDTH
    found = tl.load(pending_nodes + slot)
    tl.store(pending_nodes + slot, tl.full([], -1, tl.int64))
    token = tl.load(pending_tokens + slot * WIDTH + node, mask=is_place, other=-1)
    parent = tl.load(pending_parents + slot * WIDTH + node, mask=is_place, other=-1)
    is_good = (token >= 0) & (token < vocab_size) & ((node == 0) | ((parent >= 0) & (parent < node)))
    is_known = (node > 0) | (token == root)
    is_usable = (found > 0) & (tl.min(((is_good & is_known) | (node >= found)).to(tl.int32), 0) > 0)
    count = tl.where(is_usable, tl.minimum(found, tl.load(most + row).to(tl.int64)), 1)
    if CUTS:
        score = tl.load(pending_scores + slot * WIDTH + node, mask=is_place, other=0.0)
        tl.store(report + 2 * num_rows + row, count.to(tl.float32))
        tl.store(report + (3 + node) * num_rows + row, score, mask=is_place)
        is_likely = (node < count) & (score >= tl.load(least + row))
        count = tl.maximum(tl.sum(is_likely.to(tl.int64), 0), 1)
    is_draft = (node > 0) & (node < count)
    is_chain = tl.min(((parent == node - 1) | ~is_draft).to(tl.int32), 0)
    place = row * WIDTH + node
    tl.store(tokens + place, tl.where(node == 0, root, tl.where(is_draft, token, -1)), mask=is_place)
    tl.store(parents + place, tl.where(is_draft, parent, -1), mask=is_place)
    tl.store(num_nodes + row, count)
    tl.store(report + row, tl.where(found == 0, 0, count).to(report.dtype.element_ty))
    tl.store(report + num_rows + row, is_chain.to(report.dtype.element_ty))


@triton.jit
def put_trees(
    pending_tokens,  # int64 [slots, WIDTH], like the parents
    pending_parents,
    pending_nodes,  # int64 [slots]
    pending_scores,  # float32 [slots, WIDTH]
    slots,  # int64 [B]
    tokens,  # int64 [B, width], rows `tokens_stride` apart
    parents,
    node_scores,  # float32 [B, width]
    num_nodes,  # int64 [B]
    width,
    tokens_stride,
    parents_stride,
    scores_stride,
    KEEPS_SCORES: tl.constexpr,
    HAS_SCORES: tl.constexpr,  # otherwise all are 1
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """See `PendingTrees.put`."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot, is_node = tl.load(slots + row), node < width
    token = tl.load(tokens + row * tokens_stride + node, mask=is_node, other=-1)
    parent = tl.load(parents + row * parents_stride + node, mask=is_node, other=-1)
    tl.store(pending_tokens + slot * WIDTH + node, token, mask=is_node)
    tl.store(pending_parents + slot * WIDTH + node, parent, mask=is_node)
    tl.store(pending_nodes + slot, tl.load(num_nodes + row))
    if KEEPS_SCORES:
        score = tl.full([PADDED], 1.0, tl.float32)
        if HAS_SCORES:
            score = tl.load(node_scores + row * scores_stride + node, mask=is_node, other=0.0)
        tl.store(pending_scores + slot * WIDTH + node, score, mask=node < WIDTH)
