"""Attention in plain torch, for any device.

Requests with few queries (decoding, trees) are padded into shared batches; one with many (a chunk of a prompt) is a
batch of its own. The heads of a KV group are folded into the query dimension, because torch's CPU kernel is slow with
grouped heads: 126 instead of 24 microseconds for one bfloat16 query of 9 heads over 256 keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.attention import Attend, AttentionBatch, PaddedBatch

_SHORT = 64  # most queries of a request that shares a padded batch
# KV bytes of a padded batch on a CPU. Beyond the L2 cache a batch is slower than its parts: 64 rows of 256 keys took
# 7.2 ms, 8 rows 0.32 (bfloat16, one thread).
_BATCH_BYTES = 3 << 19
_ANY_NUMBER = 1 << 62  # of keys: a GPU has one batch


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows computed together: B rows, Q queries and K keys after padding."""

    size: int
    num_queries: int
    queries: Tensor | None  # int64 [B * Q] into the flattened batch; None: all of it, unpadded
    written: Tensor | None  # int64 [T of the group] into [B * Q]: the queries that are not padding
    keys: Tensor | None  # pool slots, int64 [B * K]; None: `views` already are the row's KV
    views: list[tuple[Tensor, Tensor]]  # per layer (k, v) [1, kv_heads, K, dim] of one row whose KV is contiguous
    mask: Tensor | None  # additive [B, 1, heads per group * Q, K]; None: everything is visible


class TorchAttention:
    """AttentionBackend on `torch.nn.functional.scaled_dot_product_attention`."""

    is_batch_invariant = False

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        self.pool = pool
        self._layers = pool.unbind()
        self._num_kv_heads, self._head_dim = pool.shape[-2:]
        self._fold = num_heads // self._num_kv_heads

    def plan(self, batch: AttentionBatch) -> Attend:
        is_cpu = self.pool.device.type == "cpu"
        most_keys = _BATCH_BYTES // (self._layers[0][0].nbytes) if is_cpu else _ANY_NUMBER
        groups = [self._group(batch, members) for members in _grouped(batch.query_lens, batch.kv_lens, most_keys)]
        return self._attend_groups(groups, batch.slot_mapping)

    def plan_padded(self, batch: PaddedBatch) -> Attend:
        """See PaddedAttention. Every query is a request, with as many keys as a row of `kv_slots` and a path."""
        size, width = batch.paths.shape
        key, place = (torch.arange(count, device=self.pool.device) for count in (batch.kv_slots.shape[1], width))
        is_prefix, is_path = key < batch.prefix_lens[:, None], place < batch.path_lengths[:, None]
        visible = torch.cat((is_prefix, is_path), 1)
        if batch.window is not None:
            positions = torch.cat((key.expand(size, -1), batch.prefix_lens[:, None] + place), 1)
            visible &= positions > (batch.prefix_lens + batch.path_lengths)[:, None] - 1 - batch.window
        prefix = batch.kv_slots.index_select(0, batch.rows).long()
        keys = torch.cat((prefix.where(is_prefix, 0), batch.paths.where(is_path, 0)), 1).flatten()
        group = _Group(size, 1, None, None, keys, [], self._additive(visible[:, None]))
        return self._attend_groups([group], batch.slot_mapping)

    def _attend_groups(self, groups: list[_Group], slot_mapping: Tensor) -> Attend:
        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self._layers[layer].index_copy_(0, slot_mapping, kv)
            if len(groups) == 1 and groups[0].queries is None:
                return self._attend(layer, q, groups[0]).flatten(1)
            out = torch.empty_like(q)
            for group in groups:
                self._scatter(out, self._attend(layer, q[group.queries], group), group)
            return out.flatten(1)

        return attend

    def _attend(self, layer: int, q: Tensor, group: _Group) -> Tensor:
        """[B * Q, heads, dim] of a group's padded queries `q`."""
        size, num_queries = group.size, group.num_queries
        k, v = self._gather(layer, group.keys, size) if group.keys is not None else group.views[layer]
        kv_heads, fold, dim = self._num_kv_heads, self._fold, self._head_dim
        if num_queries == 1:  # decoding: the heads of a group are its query rows
            out = F.scaled_dot_product_attention(q.view(size, kv_heads, fold, dim), k, v, attn_mask=group.mask)
            return out.reshape(size, -1, dim)
        folded = q.view(size, num_queries, kv_heads, fold, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        return out.view(size, kv_heads, fold, num_queries, dim).permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * fold, dim)

    def _gather(self, layer: int, keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """(k, v) [B, kv_heads, K, dim] copied out of the pool."""
        kv = self._layers[layer].index_select(0, keys)
        k, v = kv.view(size, -1, *kv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        return k, v

    def _views(self, kv_slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's (k, v) of one request without a copy, if its KV slots are consecutive; on a CPU only."""
        if kv_slots.device.type != "cpu":
            return []
        slots = kv_slots.numpy()
        first, last = int(slots[0]), int(slots[-1])
        if last - first + 1 != len(slots) or not np.all(np.diff(slots) == 1):
            return []
        k, v = self.pool[:, first : last + 1].permute(2, 0, 3, 1, 4)[:, :, None].unbind()
        return list(zip(k.unbind(), v.unbind(), strict=True))

    def _scatter(self, out: Tensor, padded: Tensor, group: _Group) -> None:
        """Write a group's results back into the flattened batch, without padding."""
        assert group.queries is not None
        if group.written is None:
            out[group.queries] = padded
        else:
            out[group.queries[group.written]] = padded[group.written]

    def _group(self, batch: AttentionBatch, members: list[int]) -> _Group:
        starts = np.cumsum([0, *batch.query_lens])
        lens, kv_lens = [batch.query_lens[r] for r in members], [batch.kv_lens[r] for r in members]
        num_queries, num_keys = max(lens), max(kv_lens)
        sizes = [(r, starts[r], batch.query_lens[r], batch.kv_lens[r], *batch.tree_sizes[r]) for r in members]
        columns = torch.tensor(sizes, dtype=torch.int64).to(self.pool.device).T[:, :, None]
        rows, first, query_len, kv_len, num_nodes, num_tree_keys = columns
        kv_slots = batch.kv_slots[:, :num_keys]
        if len(members) < len(batch.query_lens):
            kv_slots = kv_slots.index_select(0, rows[:, 0])
        views = self._views(kv_slots[0]) if len(members) == 1 else []
        key, query = (torch.arange(size, device=self.pool.device) for size in (num_keys, num_queries))
        if min(kv_lens) < num_keys:
            kv_slots = torch.where(key < kv_len, kv_slots, 0)  # KV slot 0 is zero, so padding is finite
        visible, position = None, kv_len - query_len + query
        if num_queries > 1 or min(kv_lens) < num_keys:
            visible = key <= position[:, :, None]
        if batch.tree_mask is not None and any(batch.tree_sizes[r][0] for r in members):
            tree_mask = batch.tree_mask
            node, tree_key = query - (query_len - num_nodes), key - (kv_len - num_tree_keys)
            is_inside = (node >= 0)[:, :, None] & (tree_key >= 0)[:, None, :] & (num_nodes > 0)[:, :, None]
            _, n, m = tree_mask.shape
            is_node, node, tree_key = (node >= 0) & (num_nodes > 0), node.clamp(0, n - 1), tree_key.clamp(0, m - 1)
            if batch.window is not None:
                tree_mask, depths = _windowed(tree_mask, batch.tree_sizes, batch.window)
                position = torch.where(is_node, kv_len - num_tree_keys + depths[rows, node], position)
            sees = tree_mask[rows[:, :, None], node[:, :, None], tree_key[:, None, :]] & (key < kv_len)[:, None, :]
            visible = sees | ~is_inside if visible is None else torch.where(is_inside, sees, visible)
            if batch.window is not None:
                visible &= is_inside | (key > position[:, :, None] - batch.window)
        elif batch.window is not None and num_keys > batch.window:
            is_near = key > position[:, :, None] - batch.window
            visible = is_near if visible is None else visible & is_near
        is_whole = len(members) == len(batch.query_lens) and min(lens) == num_queries
        written = torch.from_numpy(np.flatnonzero(np.arange(num_queries) < np.array(lens)[:, None]))
        return _Group(
            size=len(members),
            num_queries=num_queries,
            queries=None if is_whole else (first + torch.minimum(query, query_len - 1)).flatten(),
            written=None if min(lens) == num_queries else written.to(self.pool.device),
            keys=None if views else kv_slots.flatten(),
            views=views,
            mask=None if visible is None else self._additive(visible),
        )

    def _additive(self, visible: Tensor) -> Tensor:
        """0 where visible, else -inf, [B, 1, fold * Q, K]; in the pool's type, so that layers need not convert it."""
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=self.pool.device)
        return mask.masked_fill_(~visible, -torch.inf).repeat(1, self._fold, 1)[:, None]


def _windowed(tree_mask: Tensor, tree_sizes: list[tuple[int, int]], window: int) -> tuple[Tensor, Tensor]:
    """(masks [R, n, m] without ancestors `window` or more levels above, int64 [R, n]: depths of the nodes)."""
    sizes = torch.tensor([num_keys for _, num_keys in tree_sizes], device=tree_mask.device)[:, None, None]
    sees = tree_mask & (torch.arange(tree_mask.shape[-1], device=tree_mask.device) < sizes)
    depths = sees.sum(-1) - 1
    # Parents precede their children, so the n-th ancestor of a row of the mask has depth n - 1.
    levels_above = depths[:, :, None] + 1 - sees.cumsum(-1)
    return sees & (levels_above < window), depths


def _grouped(query_lens: list[int], key_lens: list[int], most_keys: int) -> list[list[int]]:
    """Rows that share a padded batch: short ones of similar key lengths, up to `most_keys` keys; long ones alone."""
    groups = [[r] for r, length in enumerate(query_lens) if length > _SHORT]
    short = [r for r, length in enumerate(query_lens) if length <= _SHORT]
    if len(short) * max((key_lens[r] for r in short), default=0) <= most_keys:
        return [short, *groups] if short else groups
    short.sort(key=key_lens.__getitem__, reverse=True)
    while short:
        size = max(1, most_keys // key_lens[short[0]])
        groups.append(short[:size])
        short = short[size:]
    return groups
