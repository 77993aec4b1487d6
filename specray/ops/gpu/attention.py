"""The attention backend of the Triton kernels."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from specray.ops.attention import AttentionBatch, PaddedBatch, as_bytes, pack_paths, write_kv
from specray.ops.gpu.attention_kernels import CHUNK, KEYS, attend_tiles, merge_chunks
from specray.ops.gpu.launches import num_processors, of_float8, starts_early
from specray.ops.gpu.layers import rotate_and_store
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools

# Of a tile of a prompt chunk. Tiles of 64 rows would use other tensor core instructions than those of decoding on
# Hopper, whose sums may be rounded differently.
_CAUSAL_ROWS = 32
_FEWEST_ROWS = 16  # of a tile, for the tensor cores
_LOG2_E = math.log2(math.e)


class TritonAttention:
    """AttentionBackend over `pool` [layers, slots, 2, kv_heads, dim]."""

    is_batch_invariant = True

    def __init__(self, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None) -> None:
        self.layers = complete_layers(pool, num_heads, layers)
        self.pools = layer_pools(pool, self.layers)
        self.device = pool.device
        # Enough programs to fill the device twice; with fewer, the chunks of a tile get programs of their own.
        self.enough_programs = 2 * num_processors(pool.device)
        self._groups = sorted({_group(layer) for layer in self.layers})

    def plan(self, batch: AttentionBatch) -> "TritonAttend":
        """One copy to the device; the rest is known on the host or computed there without reading it."""
        parts = [_causal_tiles(batch, _causal_queries(group)) for group in self._groups]
        parts.append(_node_tiles(batch))
        tiles = torch.from_numpy(np.concatenate(parts)).to(self.device, non_blocking=True)
        *causal, nodes = tiles.split_with_sizes([len(part) for part in parts])
        # Without trees, paths are not read.
        paths, lengths = (batch.kv_slots, tiles[:, 0]) if batch.tree_mask is None else _paths(batch)
        return TritonAttend(
            self,
            (dict(zip(self._groups, causal, strict=True)), nodes),
            (batch.kv_slots.contiguous(), paths, lengths),
            batch.slot_mapping,
            -(-max(batch.kv_lens) // CHUNK),
        )

    def plan_padded(self, batch: PaddedBatch) -> "TritonAttend":
        """See PaddedAttention. Every query is a tile of its own, the last node of its path."""
        num_chunks = -(-(batch.kv_slots.shape[1] + batch.paths.shape[1]) // CHUNK)
        slots = (batch.kv_slots, batch.paths, batch.path_lengths)
        tiles = dict.fromkeys(self._groups, batch.rows[:0]), batch.rows
        return TritonAttend(self, tiles, slots, batch.slot_mapping, num_chunks, (batch.rows, batch.prefix_lens))


class TritonAttend:
    """Attend and FusedAttend of one step."""

    def __init__(
        self,
        backend: TritonAttention,
        # of several causal queries, by how many query heads share a KV head, and of single ones (see `_tiles_of`)
        tiles: tuple[dict[int, Tensor], Tensor],
        slots: tuple[Tensor, Tensor, Tensor],  # of requests and of paths, as the kernel reads them; lengths of paths
        slot_mapping: Tensor,
        num_chunks: int,  # of the longest request
        prefixes: tuple[Tensor, Tensor] | None = None,  # rows and prefix_lens of a PaddedBatch, which needs no tiles
    ) -> None:
        self._backend, self._written = backend, slot_mapping
        self._causal, self._nodes = tiles
        self._kv_slots, self._paths, self._path_lengths = slots
        self._num_chunks = num_chunks
        self._prefixes = prefixes

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """See Attend."""
        if kv is not None:
            write_kv(self._backend.pools[layer], self._written, kv)
        return self.read(layer, q)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """See FusedAttend."""
        rotate_and_store(qkv, cos, sin, norms, eps, self._backend.pools[layer], self._written)
        return self.read(layer, qkv[:, : self._backend.layers[layer].num_heads])

    def read(self, layer: int, q: Tensor) -> Tensor:
        """[T, heads * dim] of queries [T, heads, dim] from the layer's pool, in which the step's KV is written."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group = _group(self._backend.layers[layer])
        for tiles, queries in ((self._causal[group], _causal_queries(group)), (self._nodes, 1)):
            if len(tiles):
                self._launch(out, q, layer, tiles, queries)
        return out.flatten(1)

    def _launch(self, out: Tensor, q: Tensor, layer: int, tiles: Tensor, queries: int) -> None:
        """Attention of `tiles` of up to `queries` queries."""
        backend, how, pool = self._backend, self._backend.layers[layer], self._backend.pools[layer]
        heads, dim, group, window = how.num_heads, how.head_dim, _group(how), how.window or 0
        padded = max(16, triton.next_power_of_2(dim))  # the smallest tile of a tensor core
        programs = len(tiles) * how.num_kv_heads
        num_chunks = self._num_chunks  # that a query attends to at most
        if window:
            num_chunks = min(num_chunks, 1 + -(-window // CHUNK))
        splits = queries == 1 and num_chunks > 1 and programs < backend.enough_programs
        sharing = min(num_chunks, -(-backend.enough_programs // programs)) if splits else 1  # programs of a tile
        mixed = sums = out
        if splits:
            mixed = torch.empty(self._num_chunks, len(q), heads, dim, dtype=torch.float32, device=q.device)
            sums = torch.empty(self._num_chunks, len(q), heads, 2, dtype=torch.float32, device=q.device)
        row_of, prefix_lens = self._prefixes or (tiles, tiles)  # not read without them
        rows = max(_FEWEST_ROWS, triton.next_power_of_2(queries * group))
        sinks = q if how.sinks is None else how.sinks  # not read without them
        scale = dim**-0.5 if how.scale is None else how.scale
        cap = 1.0 if how.softcap is None else how.softcap
        attend_tiles[(len(tiles), how.num_kv_heads, sharing)](
            out,
            mixed,
            sums,
            q,
            as_bytes(pool),
            tiles,
            row_of,
            prefix_lens,
            self._kv_slots,
            self._paths,
            self._path_lengths,
            sinks,
            len(q),
            q.stride(0),
            pool.stride(0),
            self._kv_slots.stride(0),
            self._paths.stride(0),
            scale * _LOG2_E if how.softcap is None else scale / cap,
            cap * _LOG2_E,
            GROUP=group,
            KV_HEADS=how.num_kv_heads,
            DIM=dim,
            DIM_PADDED=padded,
            ROWS=rows,
            KEYS=KEYS,
            CHUNK=CHUNK,
            WINDOW=window,
            CAPPED=how.softcap is not None,
            HAS_SINKS=how.sinks is not None,
            SPLIT=splits,
            PADDED=self._prefixes is not None,
            num_warps=num_warps(rows, q.dtype),
            **of_float8(pool),
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
                sinks,
                len(q),
                HEADS=heads,
                HEADS_PADDED=triton.next_power_of_2(heads),
                DIM=dim,
                DIM_PADDED=padded,
                CHUNK=CHUNK,
                WINDOW=window,
                HAS_SINKS=how.sinks is not None,
                PADDED=self._prefixes is not None,
                **starts_early(q.device),
            )


def _group(layer: LayerAttention) -> int:
    """How many query heads share a KV head."""
    return layer.num_heads // layer.num_kv_heads


def _causal_queries(group: int) -> int:
    """Of a tile of a prompt chunk."""
    return max(1, _CAUSAL_ROWS // group)


def num_warps(rows: int, dtype: torch.dtype) -> int:
    """Of a program with tiles of `rows` rows: as few as keep its values in registers.

    On tensor cores, the warps share the keys: with other warps, a row's sum over its keys has another order.
    """
    return 8 if dtype == torch.float32 and rows > _FEWEST_ROWS else 4


def _causal_tiles(batch: AttentionBatch, queries: int) -> np.ndarray:
    """Tiles of up to `queries` consecutive queries; see `_tiles_of`."""
    tiles, first = [], 0
    for request, (query_len, kv_len, (num_nodes, _)) in enumerate(_rows(batch)):
        known = query_len - num_nodes
        if known > 1:
            tiles += [
                (first + begin, min(queries, known - begin), request, kv_len - query_len + begin, -1)
                for begin in range(0, known, queries)
            ]
        first += query_len
    return _tiles_of(tiles)


def _node_tiles(batch: AttentionBatch) -> np.ndarray:
    """Tiles of single queries, which are nodes of trees or decode alone; see `_tiles_of`."""
    tiles, first = [], 0
    width = 0 if batch.tree_mask is None else batch.tree_mask.shape[1]
    for request, (query_len, kv_len, (num_nodes, num_tree_keys)) in enumerate(_rows(batch)):
        known = query_len - num_nodes
        if known == 1:
            tiles.append((first, 1, request, kv_len - query_len, -1))
        for index in range(num_nodes):
            tiles.append((first + known + index, 1, request, kv_len - num_tree_keys, request * width + index))
        first += query_len
    return _tiles_of(tiles)


def _rows(batch: AttentionBatch) -> Iterator[tuple[int, int, tuple[int, int]]]:
    return zip(batch.query_lens, batch.kv_lens, batch.tree_sizes, strict=True)


def _tiles_of(tiles: list[tuple[int, int, int, int, int]]) -> np.ndarray:
    """int32 [n, 5]: first query, number of queries, request, a position, and the node or -1.

    The position is that of the first query or, of a node, of its path's first key.
    """
    return np.array(tiles, dtype=np.int32).reshape(-1, 5)


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
