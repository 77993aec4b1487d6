"""The attention backend of the Triton kernels."""

import math

import numpy as np
import torch
import triton
from torch import Tensor

from specray.ops.attention import AttentionBatch, PaddedBatch, pack_paths
from specray.ops.gpu.attention_kernels import CHUNK, KEYS, attend_tiles, merge_chunks
from specray.ops.gpu.early_start import starts_early
from specray.ops.gpu.layers import rotate_and_store
from specray.ops.gpu.matrix import num_processors

# Of a tile of a prompt chunk. Tiles of 64 rows would use other tensor core instructions than those of decoding on
# Hopper, whose sums may be rounded differently.
_CAUSAL_ROWS = 32
_FEWEST_ROWS = 16  # of a tile, for the tensor cores
_LOG2_E = math.log2(math.e)


class TritonAttention:
    """AttentionBackend over `pool` [layers, slots, 2, kv_heads, dim]."""

    is_batch_invariant = True

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        self.pool = pool
        self.num_heads = num_heads
        _, _, _, self.num_kv_heads, self.head_dim = pool.shape
        self.group = num_heads // self.num_kv_heads
        self.causal_queries = max(1, _CAUSAL_ROWS // self.group)  # of a tile of a prompt chunk
        self.layers = pool.unbind()
        # Enough programs to fill the device twice; with fewer, the chunks of a tile get programs of their own.
        self.enough_programs = 2 * num_processors(pool.device)

    def plan(self, batch: AttentionBatch) -> "TritonAttend":
        """One copy to the device; the rest is known on the host or computed there without reading it."""
        causal, nodes = _tiles(batch, self.causal_queries)
        tiles = torch.from_numpy(np.concatenate((causal, nodes))).to(self.pool.device, non_blocking=True)
        # Without trees, paths are not read.
        paths, lengths = (batch.kv_slots, tiles[:, 0]) if batch.tree_mask is None else _paths(batch)
        return TritonAttend(
            self,
            (tiles[: len(causal)], tiles[len(causal) :]),
            (batch.kv_slots.contiguous(), paths, lengths),
            batch.slot_mapping,
            -(-max(batch.kv_lens) // CHUNK),
            batch.window,
        )

    def plan_padded(self, batch: PaddedBatch) -> "TritonAttend":
        """See PaddedAttention. Every query is a tile of its own, the last node of its path."""
        num_chunks = -(-(batch.kv_slots.shape[1] + batch.paths.shape[1]) // CHUNK)
        slots = (batch.kv_slots, batch.paths, batch.path_lengths)
        tiles, prefixes = (batch.rows[:0], batch.rows), (batch.rows, batch.prefix_lens)
        return TritonAttend(self, tiles, slots, batch.slot_mapping, num_chunks, batch.window, prefixes)


class TritonAttend:
    """Attend and FusedAttend of one step."""

    def __init__(
        self,
        backend: TritonAttention,
        tiles: tuple[Tensor, Tensor],  # of several causal queries, and of single ones (see `_tiles`)
        slots: tuple[Tensor, Tensor, Tensor],  # of requests and of paths, as the kernel reads them; lengths of paths
        slot_mapping: Tensor,
        num_chunks: int,  # of the longest request
        window: int | None,
        prefixes: tuple[Tensor, Tensor] | None = None,  # rows and prefix_lens of a PaddedBatch, which needs no tiles
    ) -> None:
        self._backend, self._written, self._window = backend, slot_mapping, window
        self._causal, self._nodes = tiles
        self._kv_slots, self._paths, self._path_lengths = slots
        self._num_chunks = num_chunks
        self._prefixes = prefixes

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See Attend."""
        pool = self._backend.layers[layer]
        pool.index_copy_(0, self._written, kv)
        return self.read(pool, q)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """See FusedAttend."""
        pool = self._backend.layers[layer]
        rotate_and_store(qkv, cos, sin, norms, eps, pool, self._written)
        return self.read(pool, qkv[:, : self._backend.num_heads])

    def read(self, pool: Tensor, q: Tensor) -> Tensor:
        """[T, heads * dim] of queries [T, heads, dim] from one layer's pool, in which the step's KV is written."""
        backend = self._backend
        out = torch.empty(len(q), backend.num_heads, backend.head_dim, dtype=q.dtype, device=q.device)
        for tiles, queries in ((self._causal, backend.causal_queries), (self._nodes, 1)):
            if len(tiles):
                self._launch(out, q, pool, tiles, queries)
        return out.flatten(1)

    def _launch(self, out: Tensor, q: Tensor, pool: Tensor, tiles: Tensor, queries: int) -> None:
        """Attention of `tiles` of up to `queries` queries."""
        backend, num_chunks = self._backend, self._num_chunks
        heads, dim = backend.num_heads, backend.head_dim
        padded = max(16, triton.next_power_of_2(dim))  # the smallest tile of a tensor core
        programs = len(tiles) * backend.num_kv_heads
        splits = queries == 1 and num_chunks > 1 and programs < backend.enough_programs
        sharing = min(num_chunks, -(-backend.enough_programs // programs)) if splits else 1  # programs of a tile
        mixed = sums = out
        if splits:
            mixed = torch.empty(num_chunks, len(q), heads, dim, dtype=torch.float32, device=q.device)
            sums = torch.empty(num_chunks, len(q), heads, 2, dtype=torch.float32, device=q.device)
        row_of, prefix_lens = self._prefixes or (tiles, tiles)  # not read without them
        rows = max(_FEWEST_ROWS, triton.next_power_of_2(queries * backend.group))
        attend_tiles[(len(tiles), backend.num_kv_heads, sharing)](
            out,
            mixed,
            sums,
            q,
            pool,
            tiles,
            row_of,
            prefix_lens,
            self._kv_slots,
            self._paths,
            self._path_lengths,
            len(q),
            q.stride(0),
            self._kv_slots.stride(0),
            self._paths.stride(0),
            _LOG2_E * dim**-0.5,
            GROUP=backend.group,
            KV_HEADS=backend.num_kv_heads,
            DIM=dim,
            DIM_PADDED=padded,
            ROWS=rows,
            KEYS=KEYS,
            CHUNK=CHUNK,
            WINDOW=self._window or 0,
            SPLIT=splits,
            PADDED=self._prefixes is not None,
            num_warps=num_warps(rows, q.dtype),
            **starts_early(q.device),
        )
        if splits:
            merge_chunks[(len(tiles),)](
                out,
                mixed,
                sums,
                tiles,
                prefix_lens,
                self._path_lengths,
                len(q),
                HEADS=heads,
                HEADS_PADDED=triton.next_power_of_2(heads),
                DIM=dim,
                DIM_PADDED=padded,
                CHUNK=CHUNK,
                WINDOW=self._window or 0,
                PADDED=self._prefixes is not None,
                **starts_early(q.device),
            )


def num_warps(rows: int, dtype: torch.dtype) -> int:
    """Of a program with tiles of `rows` rows: as few as keep its values in registers.

    On tensor cores, the warps share the keys: with other warps, a row's sum over its keys has another order.
    """
    return 8 if dtype == torch.float32 and rows > _FEWEST_ROWS else 4


def _tiles(batch: AttentionBatch, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n, 5] of causal queries and of single queries, which are nodes of trees or decode alone.

    The columns are the first query, the number of queries, the request, the position of the first query or, of a node,
    the position of its path's first key, and the node or -1.
    """
    causal, single, first = [], [], 0
    width = 0 if batch.tree_mask is None else batch.tree_mask.shape[1]
    rows = zip(batch.query_lens, batch.kv_lens, batch.tree_sizes, strict=True)
    for request, (query_len, kv_len, (num_nodes, num_tree_keys)) in enumerate(rows):
        known = query_len - num_nodes
        position = kv_len - query_len
        if known == 1:
            single.append((first, 1, request, position, -1))
        else:
            causal += [
                (first + begin, min(queries, known - begin), request, position + begin, -1)
                for begin in range(0, known, queries)
            ]
        for index in range(num_nodes):
            single.append((first + known + index, 1, request, kv_len - num_tree_keys, request * width + index))
        first += query_len
    return tuple(np.array(part, dtype=np.int32).reshape(-1, 5) for part in (causal, single))  # type: ignore[return-value]


def _paths(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """(KV slots of each node's visible keys among the last m, in order, int64 [R * n, m + 1]; their number)."""
    assert batch.tree_mask is not None
    device = batch.kv_slots.device
    sizes = torch.tensor([(kv_len, keys) for kv_len, (_, keys) in zip(batch.kv_lens, batch.tree_sizes, strict=True)])
    ends, num_keys = sizes.to(device).T[:, :, None]
    key = torch.arange(batch.tree_mask.shape[-1], device=device)
    sees = batch.tree_mask & (key < num_keys)[:, None]
    places = (ends - num_keys + key).clamp(0, batch.kv_slots.shape[1] - 1)
    return pack_paths(sees, batch.kv_slots.gather(1, places))
