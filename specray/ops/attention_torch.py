"""Attention in plain torch, for any device.

Requests with few queries (decoding, trees) are padded into shared batches; one with many (a chunk of a prompt) is a
batch of its own. The heads of a KV group are folded into the query dimension, because torch's CPU kernel is slow with
grouped heads: 126 instead of 24 microseconds for one bfloat16 query of 9 heads over 256 keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.attention import Attend, AttentionBatch, PaddedBatch, as_bytes, is_float8, write_kv
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools

_SHORT = 64  # most queries of a request that shares a padded batch
# KV bytes of a padded batch on a CPU. Beyond the L2 cache a batch is slower than its parts: 64 rows of 256 keys took
# 7.2 ms, 8 rows 0.32 (bfloat16, one thread).
_BATCH_BYTES = 3 << 19
_ANY_NUMBER = 1 << 62  # of keys: a GPU has one batch


class _MaskKind(NamedTuple):
    """What a layer's mask depends on: its window, and how many query heads share a KV head."""

    window: int | None
    fold: int


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows computed together: B rows, Q queries and K keys after padding."""

    size: int
    num_queries: int
    queries: Tensor | None  # int64 [B * Q] into the flattened batch; None: all of it, unpadded
    written: Tensor | None  # int64 [T of the group] into [B * Q]: the queries that are not padding
    keys: Tensor | slice  # pool slots, int64 [B * K]; a slice: of one row whose KV is contiguous
    masks: dict[_MaskKind, Tensor | None]  # additive [B, 1, fold * Q, K]; None: everything is visible


class TorchAttention:
    """AttentionBackend on `torch.nn.functional.scaled_dot_product_attention`."""

    is_batch_invariant = False

    def __init__(self, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None) -> None:
        self.pool = pool
        self._layers = complete_layers(pool, num_heads, layers)
        self._pools = layer_pools(pool, self._layers)
        self._mask_kinds = [_MaskKind(layer.window, layer.num_heads // layer.num_kv_heads) for layer in self._layers]

    def plan(self, batch: AttentionBatch) -> Attend:
        is_cpu = self.pool.device.type == "cpu"
        most_keys = _BATCH_BYTES // (self.pool[0, 0].nbytes) if is_cpu else _ANY_NUMBER
        groups = [self._group(batch, members) for members in _grouped(batch.query_lens, batch.kv_lens, most_keys)]
        return self._attend_groups(groups, batch.slot_mapping)

    def plan_padded(self, batch: PaddedBatch) -> Attend:
        """See PaddedAttention. Every query is a request, with as many keys as a row of `kv_slots` and a path."""
        size, width = batch.paths.shape
        key, place = (torch.arange(count, device=self.pool.device) for count in (batch.kv_slots.shape[1], width))
        is_prefix, is_path = key < batch.prefix_lens[:, None], place < batch.path_lengths[:, None]
        visible = torch.cat((is_prefix, is_path), 1)[:, None]
        prefix = batch.kv_slots.index_select(0, batch.rows).long()
        keys = torch.cat((prefix.where(is_prefix, 0), batch.paths.where(is_path, 0)), 1).flatten()
        group = _Group(size, 1, None, None, keys, self._masks(visible, visible.shape[-1]))
        return self._attend_groups([group], batch.slot_mapping)

    def _attend_groups(self, groups: list[_Group], slot_mapping: Tensor) -> Attend:
        def attend(layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
            if kv is not None:
                write_kv(self._pools[layer], slot_mapping, kv)
            if len(groups) == 1 and groups[0].queries is None:
                return self._attend(layer, q, groups[0]).flatten(1)
            out = torch.empty_like(q)
            for group in groups:
                self._scatter(out, self._attend(layer, q[group.queries], group), group)
            return out.flatten(1)

        return attend

    def _attend(self, layer: int, q: Tensor, group: _Group) -> Tensor:
        """[B * Q, heads, dim] of a group's padded queries `q`."""
        size, num_queries, (heads, dim) = group.size, group.num_queries, q.shape[1:]
        pool, keys = self._pools[layer], group.keys
        stored = pool[keys] if isinstance(keys, slice) else as_bytes(pool).index_select(0, keys)
        kv = stored.view(pool.dtype).to(q.dtype)
        k, v = kv.view(size, -1, *kv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        kv_heads, mask = kv.shape[2], group.masks[self._mask_kinds[layer]]
        if num_queries == 1:  # decoding: the heads of a group are its query rows
            out = _softmax_of(self._layers[layer], q.view(size, kv_heads, -1, dim), k, v, mask)
            return out.reshape(size, heads, dim)
        folded = q.view(size, num_queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = _softmax_of(self._layers[layer], folded, k, v, mask)
        return out.view(size, kv_heads, -1, num_queries, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)

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
        keys = _consecutive(kv_slots[0]) if len(members) == 1 else None
        key, query = (torch.arange(size, device=self.pool.device) for size in (num_keys, num_queries))
        if min(kv_lens) < num_keys:
            kv_slots = torch.where(key < kv_len, kv_slots, 0)  # KV slot 0 is zero, so padding is finite
        visible = None
        if num_queries > 1 or min(kv_lens) < num_keys:
            visible = key <= (kv_len - query_len + query)[:, :, None]
        if batch.tree_mask is not None and any(batch.tree_sizes[r][0] for r in members):
            node, tree_key = query - (query_len - num_nodes), key - (kv_len - num_tree_keys)
            is_inside = (node >= 0)[:, :, None] & (tree_key >= 0)[:, None, :] & (num_nodes > 0)[:, :, None]
            _, n, m = batch.tree_mask.shape
            node, tree_key = node.clamp(0, n - 1), tree_key.clamp(0, m - 1)
            sees = batch.tree_mask[rows[:, :, None], node[:, :, None], tree_key[:, None, :]]
            sees = sees & (key < kv_len)[:, None, :]
            visible = sees | ~is_inside if visible is None else torch.where(is_inside, sees, visible)
        is_whole = len(members) == len(batch.query_lens) and min(lens) == num_queries
        written = torch.from_numpy(np.flatnonzero(np.arange(num_queries) < np.array(lens)[:, None]))
        return _Group(
            size=len(members),
            num_queries=num_queries,
            queries=None if is_whole else (first + torch.minimum(query, query_len - 1)).flatten(),
            written=None if min(lens) == num_queries else written.to(self.pool.device),
            keys=kv_slots.flatten() if keys is None else keys,
            masks=self._masks(visible, num_keys),
        )

    def _masks(self, visible: Tensor | None, num_keys: int) -> dict[_MaskKind, Tensor | None]:
        """Of all kinds of layers, from `visible` bool [B, Q, K]; None: everything is visible."""
        masks: dict[_MaskKind, Tensor | None] = {}
        for kind in self._mask_kinds:
            if kind not in masks:
                seen = self._in_window(visible, num_keys, kind.window)
                masks[kind] = None if seen is None else self._additive(seen, kind.fold)
        return masks

    def _in_window(self, visible: Tensor | None, num_keys: int, window: int | None) -> Tensor | None:
        """`visible` without the keys outside of the window.

        A query's visible keys are at consecutive positions, of which its own is the last, in trees too.
        """
        if window is None or num_keys <= window:
            return visible
        if visible is None:
            visible = torch.ones(1, 1, num_keys, dtype=torch.bool, device=self.pool.device)
        rank = visible.cumsum(-1, dtype=torch.int32)
        return visible & (rank > rank[:, :, -1:] - window)

    def _additive(self, visible: Tensor, fold: int) -> Tensor:
        """0 where visible, else -inf, [B, 1, fold * Q, K]; in the pool's type, so that layers need not convert it."""
        dtype = torch.float32 if is_float8(self.pool.dtype) else self.pool.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.pool.device)
        return mask.masked_fill_(~visible, -torch.inf).repeat(1, fold, 1)[:, None]


def _consecutive(kv_slots: Tensor) -> slice | None:
    """The KV slots of one request as a slice, whose KV needs no copy, if they are consecutive; on a CPU only."""
    if kv_slots.device.type != "cpu":
        return None
    slots = kv_slots.numpy()
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 != len(slots) or not np.all(np.diff(slots) == 1):
        return None
    return slice(first, last + 1)


def _softmax_of(layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, kv_heads, rows, dim] of queries whose rows are those of all heads that share a KV head, head by head."""
    if layer.softcap is None and layer.sinks is None:
        mask = None if mask is None else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        weights = scores.softmax(-1)
    else:
        kv_heads, rows = scores.shape[1:3]
        sinks = layer.sinks.view(kv_heads, -1, 1)
        sinks = sinks.expand(-1, -1, rows // sinks.shape[1]).reshape(kv_heads, rows, 1).expand(len(scores), -1, -1, -1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


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
