"""The attention backend of the Triton kernels."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from specray.ops.attention import AttentionBatch, PaddedBatch, as_bytes, is_float8, pack_paths, write_kv
from specray.ops.gpu.attention_kernels import CHUNK, KEYS, attend_tiles, merge_chunks, tile_rows
from specray.ops.gpu.launches import num_processors, of_float8, starts_early
from specray.ops.gpu.layers import rotate_and_store
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools

# Most of a tile. Tiles of 64 rows would use other tensor core instructions than those of 16 on Hopper, whose sums may
# be rounded differently.
_MOST_ROWS = 32
_FEWEST_ROWS = 16  # of a tile, for the tensor cores
_MOST_PARTIAL_BYTES = 256 << 20  # of the chunks that several programs share
_ANY_NUMBER = 2  # of paths in a tile
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
        # Where trees are chains, each node attends to all keys up to its own: paths are not read.
        has_paths = batch.tree_mask is not None and not batch.are_chains
        kinds = (_prompt_tiles, _other_tiles)
        parts = [tiles_of(batch, _most_queries(group)) for group in self._groups for tiles_of in kinds]
        copied = torch.from_numpy(np.concatenate(parts)).to(self.device, non_blocking=True)
        ends = copied.split_with_sizes([len(part) for part in parts])
        launches: dict[int, list[_Launch]] = {}
        for place, (part, tiles) in enumerate(zip(parts, ends, strict=True)):
            if len(part):
                most, is_prompt = int(part[:, 1].max()), place % 2 == 0
                num_paths = min(most, _ANY_NUMBER) if has_paths and not is_prompt else 0
                launches.setdefault(self._groups[place // 2], []).append(
                    _Launch(len(part), int(part[:, 1].sum()), most, num_paths, tiles, can_split=not is_prompt)
                )
        paths, lengths = _paths(batch) if has_paths else (batch.kv_slots, copied)
        num_chunks = -(-max(batch.kv_lens) // CHUNK)
        return TritonAttend(
            self, launches, (batch.kv_slots.contiguous(), paths, lengths), batch.slot_mapping, num_chunks
        )

    def plan_padded(self, batch: PaddedBatch) -> "TritonAttend":
        """See PaddedAttention. The queries of a row share tiles; each is the last node of its path."""
        num_chunks = -(-(batch.kv_slots.shape[1] + batch.paths.shape[1]) // CHUNK)
        slots, width, launches = (batch.kv_slots, batch.paths, batch.path_lengths), batch.row_width, {}
        for group in self._groups:
            of_tile = min(width, _most_queries(group))
            size, num_paths = _queries_of(_tile_rows(of_tile, group), group), min(of_tile, _ANY_NUMBER)
            total, tiles, num_full = len(batch.rows), None, None
            num_tiles = total // width * -(-width // size)
            if batch.row_lens is not None:
                tiles, num_full = _ragged_tiles(batch, batch.row_lens, of_tile), -(-total // of_tile)
                num_tiles = len(tiles)
            launches[group] = [_Launch(num_tiles, total, of_tile, num_paths, tiles, num_full=num_full)]
        return TritonAttend(self, launches, slots, batch.slot_mapping, num_chunks, batch)


class _Launch(NamedTuple):
    """Tiles that are computed together."""

    num_tiles: int
    num_queries: int  # of all tiles
    most_queries: int  # of a tile
    num_paths: int  # PATHS of the kernels
    tiles: Tensor | None = None  # see `_tiles_of`; None: those of a PaddedBatch of equal rows
    can_split: bool = True  # whether several programs may share a tile's chunks
    num_full: int | None = None  # the fewest tiles that can have queries; None: all do


class TritonAttend:
    """Attend and FusedAttend of one step."""

    def __init__(
        self,
        backend: TritonAttention,
        launches: dict[int, list[_Launch]],  # by how many query heads share a KV head
        slots: tuple[Tensor, Tensor, Tensor],  # of requests and of paths, as the kernel reads them; lengths of paths
        slot_mapping: Tensor,
        num_chunks: int,  # of the longest request
        padded: PaddedBatch | None = None,  # whose tiles the kernels find themselves
    ) -> None:
        self._backend, self._written, self._launches = backend, slot_mapping, launches
        self._kv_slots, self._paths, self._path_lengths = slots
        self._num_chunks, self._padded = num_chunks, padded

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """See Attend."""
        if kv is not None:
            write_finite_kv(self._backend.pools[layer], self._written, kv)
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
        for launch in self._launches.get(_group(self._backend.layers[layer]), []):
            self._launch(out, q, layer, launch)
        return out.flatten(1)

    def _launch(self, out: Tensor, q: Tensor, layer: int, launch: _Launch) -> None:
        backend, how, pool = self._backend, self._backend.layers[layer], self._backend.pools[layer]
        heads, dim, group, window = how.num_heads, how.head_dim, _group(how), how.window or 0
        padded = max(16, triton.next_power_of_2(dim))  # the smallest tile of a tensor core
        num_tiles, programs = launch.num_tiles, (launch.num_full or launch.num_tiles) * how.num_kv_heads
        rows = _tile_rows(launch.most_queries, group)
        queries = _queries_of(rows, group)
        num_chunks = self._num_chunks  # that a query attends to at most
        if window:
            num_chunks = min(num_chunks, 1 + -(-window // CHUNK))
        partial_bytes = 4 * self._num_chunks * launch.num_queries * heads * (dim + 2)
        splits = launch.can_split and num_chunks > 1 and programs < backend.enough_programs
        splits = splits and partial_bytes <= _MOST_PARTIAL_BYTES
        sharing = min(num_chunks, -(-backend.enough_programs // programs)) if splits else 1  # programs of a tile
        mixed = sums = out
        if splits:
            size = self._num_chunks, launch.num_queries, heads
            mixed = torch.empty(*size, dim, dtype=torch.float32, device=q.device)
            sums = torch.empty(*size, 2, dtype=torch.float32, device=q.device)
        batch = None if launch.tiles is not None else self._padded
        # What a kernel does not read is any tensor.
        tiles = self._kv_slots if launch.tiles is None else launch.tiles
        row_of, prefix_lens, width = tiles, tiles, 1
        if batch is not None:
            row_of, prefix_lens, width = batch.rows, batch.prefix_lens, batch.row_width
        sinks = q if how.sinks is None else how.sinks
        scale = dim**-0.5 if how.scale is None else how.scale
        cap = 1.0 if how.softcap is None else how.softcap
        kind = {"CHUNK": CHUNK, "WINDOW": window, "HAS_SINKS": how.sinks is not None}
        kind |= {"PADDED": batch is not None, "PATHS": launch.num_paths}
        attend_tiles[(num_tiles, how.num_kv_heads, sharing)](
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
            width,
            launch.num_queries,
            q.stride(0),
            pool.stride(0),
            self._kv_slots.stride(0),
            self._paths.stride(0),
            scale * _LOG2_E if how.softcap is None else scale / cap,
            cap * _LOG2_E,
            QUERIES=queries,
            GROUP=group,
            KV_HEADS=how.num_kv_heads,
            DIM=dim,
            DIM_PADDED=padded,
            ROWS=rows,
            KEYS=KEYS,
            CAPPED=how.softcap is not None,
            SPLIT=splits,
            **kind,
            num_warps=num_warps(rows, q.dtype),
            **of_float8(pool),
            **starts_early(q.device),
        )
        if splits:
            merge_chunks[(num_tiles, launch.most_queries)](
                out,
                mixed,
                sums,
                tiles,
                row_of,
                prefix_lens,
                self._paths,
                self._path_lengths,
                sinks,
                width,
                launch.num_queries,
                self._paths.stride(0),
                HEADS=heads,
                HEADS_PADDED=triton.next_power_of_2(heads),
                DIM=dim,
                DIM_PADDED=padded,
                QUERIES=queries,
                **kind,
                **starts_early(q.device),
            )


def write_finite_kv(pool: Tensor, slots: Tensor, kv: Tensor) -> None:
    """`write_kv` with zeros for values that are not finite, whose keys are NaN; see `rotate_head`.

    In float8 infinity is stored as the largest number.
    """
    keys, values = kv.unbind(1)
    is_lost = (values.isnan() if is_float8(pool.dtype) else ~values.isfinite()).any(-1, keepdim=True)
    finite = torch.stack((keys.masked_fill(is_lost, torch.nan), values.masked_fill(is_lost, 0.0)), 1)
    write_kv(pool, slots, finite)


def _group(layer: LayerAttention) -> int:
    """How many query heads share a KV head."""
    return layer.num_heads // layer.num_kv_heads


def _most_queries(group: int) -> int:
    """Of a tile."""
    return max(1, _MOST_ROWS // group)


def _tile_rows(queries: int, group: int) -> int:
    """Rows of a tile of so many queries."""
    rows: int = triton.next_power_of_2(queries * group)
    return max(_FEWEST_ROWS, rows)


def _queries_of(rows: int, group: int) -> int:
    """Queries that a tile of so many rows has room for."""
    return rows // group


def num_warps(rows: int, dtype: torch.dtype) -> int:
    """Of a program with tiles of `rows` rows: as few as keep its values in registers.

    On tensor cores, the warps share the keys: with other warps, a row's sum over its keys has another order.
    """
    return 8 if dtype == torch.float32 and rows > _FEWEST_ROWS else 4


def _prompt_tiles(batch: AttentionBatch, most: int) -> np.ndarray:
    """Tiles of up to `most` queries of prompt chunks; see `_tiles_of`."""
    tiles, first = [], 0
    for request, (query_len, kv_len, (num_nodes, _)) in enumerate(_rows(batch)):
        if query_len - num_nodes > 1:
            tiles += _run(first, query_len - num_nodes, request, kv_len - query_len, most)
        first += query_len
    return _tiles_of(tiles)


def _other_tiles(batch: AttentionBatch, most: int) -> np.ndarray:
    """Tiles of up to `most` nodes of trees, or of queries that decode alone; see `_tiles_of`."""
    tiles, first = [], 0
    width = 0 if batch.tree_mask is None else batch.tree_mask.shape[1]
    for request, (query_len, kv_len, (num_nodes, num_tree_keys)) in enumerate(_rows(batch)):
        known = query_len - num_nodes
        if batch.are_chains:
            count = num_nodes + known if known <= 1 else num_nodes
            tiles += _run(first + query_len - count, count, request, kv_len - count, most)
        else:
            base, node = kv_len - num_tree_keys, request * width
            tiles += _run(first, known if known == 1 else 0, request, kv_len - query_len, most)
            tiles += [
                (first + known + begin, min(most, num_nodes - begin), request, base, node + begin)
                for begin in range(0, num_nodes, most)
            ]
        first += query_len
    return _tiles_of(tiles)


def _run(first: int, count: int, request: int, position: int, most: int) -> list[tuple[int, int, int, int, int]]:
    """Tiles of consecutive queries of which each attends to all keys up to its own."""
    return [(first + begin, min(most, count - begin), request, position + begin, -1) for begin in range(0, count, most)]


def _rows(batch: AttentionBatch) -> Iterator[tuple[int, int, tuple[int, int]]]:
    return zip(batch.query_lens, batch.kv_lens, batch.tree_sizes, strict=True)


def _ragged_tiles(batch: PaddedBatch, row_lens: Tensor, most: int) -> Tensor:
    """Tiles of up to `most` queries of rows of any length; see `_tiles_of`. The last ones may be empty."""
    num_rows, total = len(row_lens), len(batch.rows)
    with_padding = num_rows + 1
    count = min(total, with_padding + max(0, total - with_padding) // most)  # if each row has a query
    tiles = torch.empty(count, 6, dtype=torch.int32, device=row_lens.device)
    tile_rows[(with_padding,)](
        tiles, row_lens, batch.rows, batch.prefix_lens, num_rows, total, count, QUERIES=most, num_warps=1
    )
    return tiles


def _tiles_of(tiles: list[tuple[int, int, int, int, int]]) -> np.ndarray:
    """int32 [n, 6]: first query, number of queries, request, a position, the first node or -1, and earlier queries.

    The position is that of the first query or, of nodes, of the first key of their paths. Earlier queries are those of
    the tiles before.
    """
    made = np.array(tiles, dtype=np.int32).reshape(-1, 5)
    return np.column_stack((made, made[:, 1].cumsum(dtype=np.int32) - made[:, 1]))


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
