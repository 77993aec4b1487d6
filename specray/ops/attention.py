"""The interface of attention: ragged requests over a paged KV pool, with tree masks.

A backend is planned once a step and then called by every layer. It owns the layout of the KV and builds the masks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

_SCALE_BYTES = 4  # behind each row of a pool in int8
_WRITTEN_SLOTS, _WRITTEN_BYTES = 16384, 256 << 20  # at most so much of a CPU's new pool is written at once


class AttentionBatch(NamedTuple):
    """A flattened batch of R requests. Request r has `query_lens[r]` consecutive queries of the T in all.

    Query j of a request attends to the KV before its queries and to its queries up to j. If `tree_sizes[r]` is (n, m),
    the last n queries are nodes of a tree: of the last m keys, node i attends to key j iff `tree_mask[r, i, j]`.

    The position of KV before a tree is its place in `kv_slots`; the nodes of a tree follow, one position a level. A
    layer with a window counts them (see LayerAttention).
    """

    query_lens: list[int]
    kv_lens: list[int]  # the queries' own KV included
    kv_slots: Tensor  # int64 [R, at least max(kv_lens)]: KV slots by position; undefined past kv_lens[r]
    slot_mapping: Tensor  # int64 [T]: the KV slot each query's KV is written to
    tree_sizes: list[tuple[int, int]]  # (0, 0): no tree
    tree_mask: Tensor | None = None  # bool [R, n, m]: each node attends to itself and its ancestors
    are_chains: bool = False  # every tree is a chain, so that a query attends to all keys up to its own


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """T queries: all sizes are fixed and all contents are on the device, as CUDA graphs need it.

    Query t attends to the first `prefix_lens[t]` KV slots of row `rows[t]` of `kv_slots`, and behind them to its path:
    the first `path_lengths[t]` KV slots of `paths[t]`, the last of which is its own. Padding attends to KV slot 0,
    which is zero, and writes to a KV slot that nobody reads. Its result is finite, and otherwise undefined.
    """

    prefix_lens: Tensor  # int64 [T]
    rows: Tensor  # int64 [T]
    kv_slots: Tensor  # int32 or int64 [any, K]
    paths: Tensor  # int64 [T, M]
    path_lengths: Tensor  # int64 [T], at least 1
    slot_mapping: Tensor  # int64 [T]: the KV slot each query's KV is written to
    # Each so many consecutive queries have the same row and, but for padding, the same prefix; with `row_lens` at most.
    row_width: int = 1
    # int64 [R]: how many queries each row has, row by row. Padding follows them, with a prefix of 0.
    row_lens: Tensor | None = None


def pack_paths(sees: Tensor, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
    """(paths int64 [R * N, M + 1], path_lengths int64 [R * N]) of N queries of each of R requests.

    `sees` bool [R, N, M] are the keys of each query among `kv_slots` int64 [R, M].
    """
    width = sees.shape[-1]
    rank = torch.where(sees, sees.cumsum(-1) - 1, width)  # hidden keys go to one more column
    paths = torch.zeros(*sees.shape[:2], width + 1, dtype=torch.int64, device=sees.device)
    paths.scatter_(2, rank, kv_slots[:, None].expand_as(sees))
    return paths.flatten(0, 1), sees.sum(-1).flatten()


# attend(layer, q [T, heads, dim], kv [T, 2, kv_heads, dim]) -> [T, heads * dim]; writes kv, then reads the pool. The
# sizes are those of the layer's LayerAttention. Without kv it only reads: other queries wrote the step's KV.
Attend = Callable[[int, Tensor, Tensor | None], Tensor]


@runtime_checkable
class FusedAttend(Protocol):
    """An Attend that also norms and rotates, in the same launch that writes the KV."""

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """[T, heads * dim] from q, k and v as projected, [T, heads + 2 * kv_heads, dim]; qkv is overwritten.

        cos and signed sin are float32 [T, 1, dim]; `norms` are the weights [dim] of q's and k's norms.
        """


class AttentionBackend(Protocol):
    """Kernels over a KV pool [layers, slots, 2, kv_heads, dim] in which slot 0 … page-1 stay zero."""

    is_batch_invariant: bool  # a query's result has the same bits in any batch, tree or prompt chunk

    def plan(self, batch: AttentionBatch) -> Attend:
        """Prepare what all layers of one step share."""


@runtime_checkable
class PaddedAttention(Protocol):
    """A backend whose kernels can be captured in a CUDA graph."""

    def plan_padded(self, batch: PaddedBatch) -> Attend:
        """Like AttentionBackend.plan, without reading a tensor on the host."""


def recordable(attention: AttentionBackend) -> PaddedAttention | None:
    """The backend, if a CUDA graph can record its kernels; None if it plans every step on the host."""
    return attention if isinstance(attention, PaddedAttention) else None


def make_pool(
    num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A KV pool [layers, slots, 2, kv_heads, dim] of zeros; in int8 with the bytes of a scale behind each row.

    On a CPU the slots that are used first are written here, so that no step waits for the system to find their memory:
    a step that was the first to write to a new page of every layer took 20 to 120 ms longer.
    """
    columns = row_bytes(head_dim, dtype) // dtype.itemsize
    pool = make_zeros((num_layers, num_slots, 2, num_kv_heads, columns), dtype, device)
    if device.type == "cpu":
        slot_bytes = pool[:, 0].numel() * dtype.itemsize
        pool[:, : min(_WRITTEN_SLOTS, _WRITTEN_BYTES // slot_bytes)].zero_()
    return pool


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's key or value in a pool of `dtype`."""
    return head_dim * dtype.itemsize + (_SCALE_BYTES if dtype is torch.int8 else 0)


def head_dim_of(pool: Tensor) -> int:
    """The size of a head of `pool`."""
    return pool.shape[-1] - (_SCALE_BYTES if pool.dtype is torch.int8 else 0)


def make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU their pages are allocated on first write, so that a large pool costs nothing at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def write_kv(pool: Tensor, kv_slots: Tensor, kv: Tensor) -> None:
    """Write kv [T, 2, kv_heads, dim] to the KV slots int64 [T] of one layer's pool [slots, 2, kv_heads, dim].

    Numbers are rounded to nearest in float8, and beyond its largest one to that one.
    """
    if is_float8(pool.dtype):
        largest = torch.finfo(pool.dtype).max
        kv = kv.clamp(-largest, largest).to(pool.dtype)
    as_bytes(pool).index_copy_(0, kv_slots, as_bytes(kv))


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a pool holds keys and values in 8 bits without scales."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def as_bytes(pool: Tensor) -> Tensor:
    """A pool in float8 as uint8, another one as it is: few operations take float8."""
    return pool.view(torch.uint8) if is_float8(pool.dtype) else pool


def move_kv(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the KV of slots `source` to slots `target` (int64 [n]) in every layer; overlaps are safe."""
    pool = as_bytes(pool)
    pool[:, target] = pool[:, source]


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
