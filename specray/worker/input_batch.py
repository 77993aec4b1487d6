"""One step's input: every request's known tokens, followed by its draft tree, in one flat batch.

Prefill and decode are not distinguished. A request contributes the known tokens that are not computed yet; the last one
is the root of its tree. If they exceed the step's budget, the tree is that one node and nothing is sampled from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.ops.cpu import steps as cpu_steps
from specray.ops.cpu.library import kernels_on
from specray.ops.token_mask import TokenMask
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RaggedIndex, RequestTable
from specray.step import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """The R scheduled requests of a step. Row r is the r-th request of the plan."""

    states: list[RequestState]
    num_known: list[int]  # known tokens to compute in this step, the root included
    sampling: list[int]  # rows whose known tokens are all computed after this step: they sample
    slots: Tensor  # int64 [R]
    starts: Tensor  # int64 [R], position of the first token to compute
    counts: Tensor  # int64 [R], num_known on the device
    last: Tensor  # int64 [R], positions of the last known tokens to compute: the roots

    @classmethod
    def of(cls, table: RequestTable, plan: StepPlan) -> "ScheduledBatch":
        """Bring the table up to date with a plan; one copy to the device."""
        for slot in plan.freed_slots:
            table.free(slot)
        for new in plan.new_requests:
            table.enter(new)
        for row in plan.rows:
            table.extend(row.slot, [], row.new_block_ids)
        states = [table.states[row.slot] for row in plan.rows]
        starts = [state.num_computed_tokens for state in states]
        pending = [len(state.token_ids) - start for state, start in zip(states, starts, strict=True)]
        num_known = [min(row.num_tokens, count) for row, count in zip(plan.rows, pending, strict=True)]
        sampling = [place for place, count in enumerate(pending) if num_known[place] == count]
        last = [start + count - 1 for start, count in zip(starts, num_known, strict=True)]
        columns = table.flush([row.slot for row in plan.rows], starts, num_known, last)
        return cls(states, num_known, sampling, *columns.unbind())

    @property
    def are_all_sampling(self) -> bool:
        return len(self.sampling) == len(self.states)

    def roots(self, table: RequestTable) -> Tensor:
        """The last known token that each row computes, int64 [R]."""
        return table.tokens_at(self.slots, self.last)


class StepBatch(NamedTuple):
    """A step's rows and their trees."""

    rows: ScheduledBatch
    tree: DraftTree  # of all R rows
    num_nodes: list[int]  # the host's copy of tree.num_nodes
    mask: TokenMask | None = None  # of the logits of the rows that sample; None: no request has a grammar

    @property
    def only_decodes(self) -> bool:
        """Whether every row's only known token is the root of its tree, and samples."""
        return self.rows.are_all_sampling and max(self.rows.num_known) == 1


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """A step's rows and trees, flattened to T tokens."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionBatch
    roots: Tensor  # int64 [R], place of each row's root; its nodes follow in order
    node_places: Tensor | None  # int64 [M], places of the nodes of the rows that sample; None: all T


class FlatTokens(NamedTuple):
    """The T tokens of rows and trees."""

    token_ids: Tensor  # int64 [T], like the next two
    positions: Tensor
    slot_mapping: Tensor  # KV slots to write
    roots: Tensor  # int64 [R], see InputBatch
    ancestors: Tensor | None  # see DraftTree; None: there are no drafts


def build_batch(table: RequestTable, batch: StepBatch) -> InputBatch:
    """Flatten rows and their trees."""
    rows, tree, num_nodes = batch.rows, batch.tree, batch.num_nodes
    lens = [known + nodes - 1 for known, nodes in zip(rows.num_known, num_nodes, strict=True)]
    kv_lens = [state.num_computed_tokens + length for state, length in zip(rows.states, lens, strict=True)]
    flat = _flatten(table, rows, tree, sum(lens))
    attention = AttentionBatch(
        lens,
        kv_lens,
        table.kv_slots_of(rows.slots, max(kv_lens)),
        flat.slot_mapping,
        [(count, count) if count > 1 else (0, 0) for count in num_nodes],
        flat.ancestors,
        are_chains=tree.are_chains,
    )
    token_ids, positions, roots = flat.token_ids, flat.positions, flat.roots
    if rows.are_all_sampling and sum(lens) == sum(num_nodes):
        return InputBatch(token_ids, positions, attention, roots, None)
    sampling = np.array(rows.sampling, dtype=np.int64)
    num_sampled = int(np.array(num_nodes)[sampling].sum())
    selected = torch.from_numpy(sampling).to(roots.device)
    nodes = RaggedIndex.of(tree.num_nodes.index_select(0, selected), num_sampled)
    node_places = roots.index_select(0, selected).index_select(0, nodes.rows) + nodes.offsets
    return InputBatch(token_ids, positions, attention, roots, node_places)


def committed_places(
    roots: Tensor, counts: Tensor, order: Sequence[int], nodes: Tensor, num_tokens: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Places, int64 [sum of lengths], of the tokens that rows `order` committed, row by row.

    These are the known tokens before the root and the accepted path: `num_tokens` int64 [R] nodes of `nodes` int64
    [R, D + 1]. `lengths` are their numbers, in the same order. `roots` int64 [R] are the places of the roots: each is
    the last of a row's `counts` int64 [R] known tokens, and its nodes follow it.
    """
    rows = torch.tensor(order, dtype=torch.int64).to(roots.device)
    if (own := kernels_on(roots.device)) is not None:
        return cpu_steps.committed_places(own, rows, roots, counts, num_tokens, nodes, sum(lengths))
    before = (counts - 1).index_select(0, rows)
    index = RaggedIndex.of(before + num_tokens.index_select(0, rows), sum(lengths))
    row, depth = rows.index_select(0, index.rows), index.offsets - before.index_select(0, index.rows)
    node = torch.where(depth >= 0, nodes[row, depth.clamp(min=0)], depth)
    return roots.index_select(0, row) + node


def _flatten(table: RequestTable, rows: ScheduledBatch, tree: DraftTree, total: int) -> FlatTokens:
    """`total` is T."""
    if table.kernels is not None:
        columns, trees = (rows.slots, rows.starts, rows.counts), (tree.tokens, tree.parents, tree.num_nodes)
        return FlatTokens(*table.kernels.build_step(columns, trees, total, has_drafts=tree.max_depth > 0))
    query_lens = rows.counts + tree.num_nodes - 1
    index = RaggedIndex.of(query_lens, total)
    slots, starts, counts = (column.index_select(0, index.rows) for column in (rows.slots, rows.starts, rows.counts))
    places_in_kv, node = starts + index.offsets, index.offsets - counts + 1
    token_ids = table.tokens_at(slots, torch.where(node > 0, starts, places_in_kv))
    positions, ancestors = places_in_kv, None
    if tree.max_depth:
        ancestors = tree.ancestors()
        depth = (ancestors.sum(-1) - 1)[index.rows, node.clamp(min=0)]
        token_ids = torch.where(node > 0, tree.tokens[index.rows, node.clamp(min=0)], token_ids)
        positions = torch.where(node > 0, places_in_kv - node + depth, places_in_kv)
    roots = query_lens.cumsum(0) - tree.num_nodes
    return FlatTokens(token_ids, positions, table.kv_slots_at(slots, places_in_kv), roots, ancestors)
