"""An attention backend of two: one for causal requests, one for requests with a draft tree.

flash-attention has no masks and flashinfer has none with a sliding window, so another kernel computes the trees there.
Both read the KV that was written once for the whole batch. The libraries plan every batch on the host, which CUDA
graphs cannot repeat, so another backend computes the padded steps of graphs.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import Attend, AttentionBatch, PaddedAttention, PaddedBatch
from specray.ops.gpu.layers import rotate_and_store

# (one layer's pool [slots, 2, kv_heads, dim], q [T, heads, dim]) -> [T, heads * dim] of a planned batch
Read = Callable[[Tensor, Tensor], Tensor]
PlanRead = Callable[[AttentionBatch], Read]


class RoutedAttention:
    """AttentionBackend over `pool` [layers, slots, 2, kv_heads, dim].

    `takes_chains`: trees that are chains are causal requests. `padded` is over the same pool.
    """

    is_batch_invariant = False

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        causal: PlanRead,
        trees: PlanRead,
        padded: PaddedAttention,
        takes_chains: bool = True,
    ) -> None:
        self.layers = pool.unbind()
        self.num_heads = num_heads
        self._causal = causal
        self._trees = trees
        self._padded = padded
        self._takes_chains = takes_chains

    def plan(self, batch: AttentionBatch) -> "RoutedAttend":
        return RoutedAttend(self, batch, self._read(batch))

    def plan_padded(self, batch: PaddedBatch) -> Attend:
        """See PaddedAttention."""
        return self._padded.plan_padded(batch)

    def _read(self, batch: AttentionBatch) -> Read:
        is_causal = batch.are_chains and self._takes_chains
        has_tree = [num_nodes > 0 and not is_causal for num_nodes, _ in batch.tree_sizes]
        if len(set(has_tree)) == 1:
            return (self._trees if has_tree[0] else self._causal)(batch)
        # One copy to the device: the requests and the queries of each part.
        members = [np.flatnonzero(np.array(has_tree) == wanted) for wanted in (False, True)]
        places = [np.flatnonzero(np.repeat(np.array(has_tree) == wanted, batch.query_lens)) for wanted in (False, True)]
        index = torch.from_numpy(np.concatenate((*members, *places))).to(batch.kv_slots.device, non_blocking=True)
        rows, other_rows, queries, other_queries = index.split_with_sizes([len(p) for p in (*members, *places)])
        first = self._causal(_part(batch, members[0].tolist(), rows, queries))
        second = self._trees(_part(batch, members[1].tolist(), other_rows, other_queries))

        def read(pool: Tensor, q: Tensor) -> Tensor:
            out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
            out.index_copy_(0, queries, first(pool, q.index_select(0, queries)))
            return out.index_copy_(0, other_queries, second(pool, q.index_select(0, other_queries)))

        return read


class RoutedAttend:
    """Attend and FusedAttend of one step."""

    def __init__(self, backend: RoutedAttention, batch: AttentionBatch, read: Read) -> None:
        self._backend = backend
        self._written = batch.slot_mapping
        self._read = read

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See Attend."""
        pool = self._backend.layers[layer]
        pool.index_copy_(0, self._written, kv)
        return self._read(pool, q)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """See FusedAttend."""
        pool = self._backend.layers[layer]
        rotate_and_store(qkv, cos, sin, norms, eps, pool, self._written)
        return self._read(pool, qkv[:, : self._backend.num_heads])


def _part(batch: AttentionBatch, members: Sequence[int], rows: Tensor, queries: Tensor) -> AttentionBatch:
    """The requests `members`, which are `rows` on the device, with the `queries` of the batch that are theirs."""
    return batch._replace(
        query_lens=[batch.query_lens[r] for r in members],
        kv_lens=[batch.kv_lens[r] for r in members],
        kv_slots=batch.kv_slots.index_select(0, rows),
        slot_mapping=batch.slot_mapping.index_select(0, queries),
        tree_sizes=[batch.tree_sizes[r] for r in members],
        tree_mask=None if batch.tree_mask is None else batch.tree_mask.index_select(0, rows),
    )
