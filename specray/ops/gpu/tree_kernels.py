"""Draft trees with Triton, without a read by the host: their walk, the compaction of accepted KV, and waiting for trees
of another process.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from specray.ops.gpu.shared_kernels import start_of


@triton.jit
def walk_tree(
    outcome,  # int64 [B, 2 + 2 * (max_depth + 1)]
    chosen,  # int64 [T]: the target's token after each node, tree by tree
    is_finite,  # int8 [T]
    drafts,  # int64 [B, any], rows `tree_stride` apart, like the parents
    parents,
    num_nodes,  # int64 [B]
    max_depth,
    tree_stride,
    NODES_PADDED: tl.constexpr,
    DEPTHS_PADDED: tl.constexpr,
):
    """See `VerifyOutput`. Of equal siblings, the first counts."""
    tree, count = tl.program_id(0).to(tl.int64), tl.load(num_nodes + tl.program_id(0))
    index, depths = tl.arange(0, NODES_PADDED), tl.arange(0, DEPTHS_PADDED)
    is_draft = (index > 0) & (index < count)
    draft = tl.load(drafts + tree * tree_stride + index, mask=is_draft, other=-1)
    parent = tl.load(parents + tree * tree_stride + index, mask=is_draft, other=-1)
    walked, nodes = tl.zeros([DEPTHS_PADDED], tl.int64), tl.zeros([DEPTHS_PADDED], tl.int64)
    node, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    walks = count > 0
    is_good = walks
    start = start_of(num_nodes, tree)
    while walks:
        token = tl.load(chosen + start + node)
        is_good = tl.load(is_finite + start + node) != 0
        walked = tl.where(depths == depth, token, walked)
        nodes = tl.where(depths == depth, node, nodes)
        node = tl.min(tl.where((parent == node) & (draft == token), index, NODES_PADDED), 0)
        walks = is_good & (depth < max_depth) & (node < NODES_PADDED)
        depth += 1
    report = outcome + tree * (4 + 2 * max_depth)
    num_tokens = tl.where(is_good, depth, 0)
    tl.store(report, num_tokens)
    tl.store(report + 1, num_tokens)
    tl.store(report + 2 + depths, walked, mask=depths <= max_depth)
    tl.store(report + 3 + max_depth + depths, nodes, mask=depths <= max_depth)


@triton.jit
def compact_path(
    pool,  # [layers, slots, SIZE], contiguous
    kv_slots,  # int64 [B, slots_width]: KV slots of the nodes
    nodes,  # int64 [B, any], rows `nodes_stride` apart: accepted nodes by depth
    counts,  # int64 [B], `count_stride` apart: how many of them count
    num_slots,
    slots_width,
    nodes_stride,
    count_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the KV of the node at each depth to the KV slot of the node with that number.

    A program has one request, layer and part of a slot. It copies by ascending depth. No slot is read after it was
    written, because the number of a node is at least its depth and grows along a path.
    """
    tree, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    values = pool + layer * num_slots * SIZE + column
    for depth in range(1, tl.load(counts + tree * count_stride).to(tl.int32)):
        node = tl.load(nodes + tree * nodes_stride + depth)
        if node != depth:
            source = tl.load(kv_slots + tree * slots_width + node)
            target = tl.load(kv_slots + tree * slots_width + depth)
            moved = tl.load(values + source * SIZE, mask=column < SIZE)
            tl.store(values + target * SIZE, moved, mask=column < SIZE)


@triton.jit(do_not_specialize=["number"])
def release_trees(flag, number):  # int64 [1]
    """Set the flag, behind everything that the stream has written."""
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["number", "microseconds", "num_trees"])
def await_trees(
    found,  # int64 [B]: numbers of nodes, -1 if there are no trees
    in_time,  # int64 [1]
    flag,  # int64 [1], which another process sets to `number` when its trees are there
    num_nodes,  # int64 [B], `stride` apart
    number,
    microseconds,  # to wait for them
    num_trees,
    stride,
    most,  # nodes of a tree
    BLOCK: tl.constexpr,
):
    """One warp polls the flag. That ends by the GPU's clock, whatever the other process does."""
    until = _now() + microseconds.to(tl.int64) * 1000
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen != number) & (_now() < until):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    are_there = seen == number
    for first in range(0, num_trees, BLOCK):
        tree = first + tl.arange(0, BLOCK)
        count = tl.load(num_nodes + tree * stride, mask=are_there & (tree < num_trees), other=-1)
        tl.store(found + tree, tl.where(count <= most, count, -1), mask=tree < num_trees)
    tl.store(in_time, are_there.to(tl.int64))


@triton.jit
def _now():
    """The GPU's clock in nanoseconds, the same in all lanes of a warp, which must leave a loop together."""
    return tl.max(globaltimer() + tl.zeros([32], tl.int64), 0)
