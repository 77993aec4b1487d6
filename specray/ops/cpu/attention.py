"""Attention over a paged KV pool with the CPU kernels: prompt chunks, decoding and draft trees in one call."""

import ctypes
from itertools import chain

import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch, head_dim_of
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES, KV_TYPES, PoolStruct, RequestsStruct
from specray.ops.cpu.threads import num_threads


def commit_paths(kernels: Kernels, pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
    """Move the KV of accepted paths in `pool` [layers, slots, 2, kv_heads, dim]; see KVCache.commit."""
    kv_slots = kv_slots.contiguous()
    layer_bytes, slot_bytes = (stride * pool.itemsize for stride in pool.stride()[:2])
    paths = (*kv_slots.shape[:1], pointer(kv_slots), kv_slots.shape[1], pointer(outcome), outcome.shape[1])
    kernels.move_kv(pointer(pool), len(pool), layer_bytes, slot_bytes, *paths)


class PagedAttention:
    """AttentionBackend on the CPU kernels."""

    is_batch_invariant = True

    def __init__(self, kernels: Kernels, pool: Tensor, num_heads: int) -> None:
        self.kernels = kernels
        self.pool = pool
        self.num_heads = num_heads
        self.head_dim = head_dim_of(pool)
        self.layer_bytes = pool.stride(0) * pool.itemsize  # from one layer's part of the pool to the next
        sizes = KV_TYPES[pool.dtype], pool.shape[-2], self.head_dim
        self._pools = [PoolStruct(pointer(layer), *sizes) for layer in pool]

    def plan(self, batch: AttentionBatch) -> "PagedAttend":
        return PagedAttend(self, batch)

    def pool_of(self, layer: int) -> PoolStruct:
        """One layer's part of the pool."""
        return self._pools[layer]


class PagedAttend:
    """Attend of one step. Also the part of a step that a stack of fused layers reads."""

    def __init__(self, backend: PagedAttention, batch: AttentionBatch) -> None:
        self.backend = backend
        self.written = batch.slot_mapping.contiguous()
        count = len(batch.query_lens)
        query_lens, kv_lens = ((ctypes.c_int32 * count)(*lens) for lens in (batch.query_lens, batch.kv_lens))
        trees = (ctypes.c_int32 * (2 * count))(*chain.from_iterable(batch.tree_sizes))
        kv_slots = batch.kv_slots.contiguous()
        mask = None if batch.tree_mask is None else batch.tree_mask.contiguous()
        self._kept = (query_lens, kv_lens, trees, kv_slots, mask)  # the struct has their addresses
        self.requests = RequestsStruct(
            count=count,
            slots_width=kv_slots.shape[1],
            mask_rows=0 if mask is None else mask.shape[1],
            mask_columns=0 if mask is None else mask.shape[2],
            window=batch.window or 0,
            query_lens=ctypes.addressof(query_lens),
            kv_lens=ctypes.addressof(kv_lens),
            tree_sizes=ctypes.addressof(trees),
            kv_slots=pointer(kv_slots),
            tree_mask=pointer(mask),
        )

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See Attend."""
        backend = self.backend
        assert q.dtype == kv.dtype, (q.dtype, kv.dtype)
        assert backend.pool.dtype in (q.dtype, torch.int8), (q.dtype, backend.pool.dtype)
        out = torch.empty(len(q), backend.num_heads * backend.head_dim, dtype=q.dtype)
        q, kv = q.contiguous(), kv.contiguous()
        backend.kernels.attention(
            ctypes.byref(backend.pool_of(layer)),
            ctypes.byref(self.requests),
            pointer(self.written),
            len(q),
            backend.num_heads,
            pointer(q),
            pointer(kv),
            pointer(out),
            FLOAT_TYPES[q.dtype],
            num_threads(),
        )
        return out
