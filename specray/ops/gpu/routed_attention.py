"""An attention backend of several: for each layer one for causal requests, and one for requests with a draft tree.

flash-attention has no masks and flashinfer has none with a sliding window, so another kernel computes the trees there.
All read the KV that was written once for the whole batch. The libraries plan every batch on the host, which CUDA
graphs cannot repeat, so another backend computes the padded steps of graphs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import Attend, AttentionBatch, PaddedBatch
from specray.ops.gpu.attention import TritonAttention, write_finite_kv
from specray.ops.gpu.layers import rotate_and_store

# (layer, q [T, heads, dim]) -> [T, heads * dim] of a planned batch, whose KV is written
Read = Callable[[int, Tensor], Tensor]
PlanRead = Callable[[AttentionBatch], Read]


class LayerRoute(NamedTuple):
    """What computes a layer. `takes_chains`: trees that are chains are causal requests."""

    causal: PlanRead
    trees: PlanRead
    takes_chains: bool = True


class RoutedAttention:
    """AttentionBackend with a route for each layer; layers with the same one share its plans.

    `triton` is over the same pool, and computes padded batches.
    """

    is_batch_invariant = False

    def __init__(
        self,
        triton: TritonAttention,
        routes: Sequence[LayerRoute],
    ) -> None:
        self.layers, self.pools = triton.layers, triton.pools
        self._triton = triton
        self._routes = routes

    def plan(self, batch: AttentionBatch) -> "RoutedAttend":
        reads = {route: _planned(route, batch) for route in set(self._routes)}
        return RoutedAttend(self, batch.slot_mapping, [reads[route] for route in self._routes])

    def plan_padded(self, batch: PaddedBatch) -> Attend:
        """See PaddedAttention."""
        return self._triton.plan_padded(batch)


class RoutedAttend:
    """Attend and FusedAttend of one step."""

    def __init__(self, backend: RoutedAttention, written: Tensor, reads: Sequence[Read]) -> None:
        self._backend, self._written = backend, written
        self._reads = reads  # of each layer

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """See Attend."""
        if kv is not None:
            write_finite_kv(self._backend.pools[layer], self._written, kv)
        return self._reads[layer](layer, q)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """See FusedAttend."""
        rotate_and_store(qkv, cos, sin, norms, eps, self._backend.pools[layer], self._written)
        return self._reads[layer](layer, qkv[:, : self._backend.layers[layer].num_heads])


def _planned(route: LayerRoute, batch: AttentionBatch) -> Read:
    if route.causal is route.trees:
        return route.causal(batch)
    is_causal = batch.are_chains and route.takes_chains
    has_tree = [num_nodes > 0 and not is_causal for num_nodes, _ in batch.tree_sizes]
    if len(set(has_tree)) == 1:
        return (route.trees if has_tree[0] else route.causal)(batch)
    # One copy to the device: the requests and the queries of each part.
    members = [np.flatnonzero(np.array(has_tree) == wanted) for wanted in (False, True)]
    places = [np.flatnonzero(np.repeat(np.array(has_tree) == wanted, batch.query_lens)) for wanted in (False, True)]
    index = torch.from_numpy(np.concatenate((*members, *places))).to(batch.kv_slots.device, non_blocking=True)
    rows, other_rows, queries, other_queries = index.split_with_sizes([len(p) for p in (*members, *places)])
    first = route.causal(_part(batch, members[0].tolist(), rows, queries))
    second = route.trees(_part(batch, members[1].tolist(), other_rows, other_queries))

    def read(layer: int, q: Tensor) -> Tensor:
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        out.index_copy_(0, queries, first(layer, q.index_select(0, queries)))
        return out.index_copy_(0, other_queries, second(layer, q.index_select(0, other_queries)))

    return read


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
