"""Attention over a paged KV pool with the CPU kernels: prompt chunks, decoding and draft trees in one call."""

import ctypes
import operator
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.structs import FLOAT_TYPES, KV_TYPES, LayerAttentionStruct, PoolStruct, RequestsStruct, pointer
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools


def commit_paths(kernels: Kernels, pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
    """Move the KV of accepted paths in `pool` [layers, slots, 2, kv_heads, dim]; see KVCache.commit."""
    kv_slots = kv_slots.contiguous()
    layer_bytes, slot_bytes = (stride * pool.itemsize for stride in pool.stride()[:2])
    paths = (*kv_slots.shape[:1], pointer(kv_slots), kv_slots.shape[1], pointer(outcome), outcome.shape[1])
    kernels.move_kv(pointer(pool), len(pool), layer_bytes, slot_bytes, *paths)


class PagedAttention:
    """AttentionBackend on the CPU kernels."""

    is_batch_invariant = True

    def __init__(
        self, kernels: Kernels, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None
    ) -> None:
        self.kernels = kernels
        self.pool = pool
        self._layers = complete_layers(pool, num_heads, layers)
        pools = layer_pools(pool, self._layers)
        self._structs = (LayerAttentionStruct * len(pool))(*map(_struct, self._layers, pools))

    def plan(self, batch: AttentionBatch) -> "PagedAttend":
        return PagedAttend(self, batch)

    def address_of(self, layer: int) -> int:
        """Of the kernels' struct of a layer, which those of the layers after it follow."""
        return ctypes.addressof(self._structs) + layer * ctypes.sizeof(LayerAttentionStruct)


def _struct(layer: LayerAttention, pool: Tensor) -> LayerAttentionStruct:
    """Of a complete layer and its pool."""
    of_pool = PoolStruct(
        pool.data_ptr(), pool.stride(0) * pool.itemsize, KV_TYPES[pool.dtype], layer.num_kv_heads, layer.head_dim
    )
    scale = np.float32(1) / np.sqrt(np.float32(layer.head_dim)) if layer.scale is None else layer.scale
    sizes = layer.num_heads, layer.window or 0, scale, layer.softcap or 0.0
    return LayerAttentionStruct(of_pool, *sizes, pointer(layer.sinks))


class PagedAttend:
    """Attend of one step. Also the part of a step that a stack of fused layers reads."""

    def __init__(self, backend: PagedAttention, batch: AttentionBatch) -> None:
        self.backend = backend
        self.written = batch.slot_mapping.contiguous()
        self._num_pairs = sum(map(operator.mul, batch.query_lens, batch.kv_lens))  # of queries and keys
        count = len(batch.query_lens)
        query_lens, kv_lens = ((ctypes.c_int32 * count)(*lens) for lens in (batch.query_lens, batch.kv_lens))
        trees = (ctypes.c_int32 * (2 * count))(*chain.from_iterable(batch.tree_sizes))
        kv_slots = batch.kv_slots.contiguous()
        mask = None if batch.tree_mask is None else batch.tree_mask.contiguous()
        self._keep_alive = (query_lens, kv_lens, trees, kv_slots, mask)  # the struct has their addresses
        self.requests = RequestsStruct(
            count=count,
            slots_width=kv_slots.shape[1],
            mask_rows=0 if mask is None else mask.shape[1],
            mask_columns=0 if mask is None else mask.shape[2],
            query_lens=ctypes.addressof(query_lens),
            kv_lens=ctypes.addressof(kv_lens),
            tree_sizes=ctypes.addressof(trees),
            kv_slots=pointer(kv_slots),
            tree_mask=pointer(mask),
        )

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """See Attend."""
        backend = self.backend
        assert kv is None or q.dtype == kv.dtype
        assert backend.pool.itemsize == 1 or backend.pool.dtype is q.dtype, (q.dtype, backend.pool.dtype)
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
        q, kv = q.contiguous(), None if kv is None else kv.contiguous()
        backend.kernels.attention(
            backend.address_of(layer),
            ctypes.byref(self.requests),
            pointer(self.written),
            len(q),
            pointer(q),
            pointer(kv),
            pointer(out),
            FLOAT_TYPES[q.dtype],
            num_threads(2 * self._num_pairs * q[0].numel() * q.itemsize),
        )
        return out
