"""What attention is asked for, whatever computes it: ragged rows over a paged KV pool, tree masks included.

A backend is planned once per step and then called by every layer. It owns the layout of a layer's KV
and how masks are made; callers know neither. Not here: any kernel (`attention_torch`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """A flattened batch as attention sees it. Row r has `query_lens[r]` consecutive queries of the T in all.

    Query j of a row sees the row's KV before its queries, and of its queries those up to j; but the last
    `len(trees[r])` queries form a tree in which query i sees tree query j iff `trees[r][i, j]`.
    """

    query_lens: list[int]
    kv_slots: list[np.ndarray]  # per row int64 [KV length]: pool slots, the row's queries last
    slot_mapping: Tensor  # int64 [T]: where each query's KV is written
    trees: list[np.ndarray | None]  # per row bool [nodes, nodes], each node sees itself and its ancestors


# attend(layer, q [T, heads, dim], kv [T, 2, kv_heads, dim]) -> [T, heads * dim]; writes kv, then reads the pool
Attend = Callable[[int, Tensor, Tensor], Tensor]


class AttentionBackend(Protocol):
    """Kernels over a KV pool [layers, slots, 2, kv_heads, dim] in which slot 0 … page-1 stay zero."""

    def plan(self, rows: RaggedRows) -> Attend:
        """Prepare what all layers of one step share."""


def move_kv(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the KV of slots `source` to slots `target` (int64 [n]) in every layer; overlaps are safe."""
    pool[:, target] = pool[:, source]


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
