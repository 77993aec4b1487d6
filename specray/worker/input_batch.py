"""One step's input: every request's known tokens, followed by its draft tree, in one flat batch.

Prefill and decode are not distinguished. A request contributes the known tokens that are not computed yet; the last one
is the root of its tree. If they exceed the step's budget, the tree is that one node and nothing is sampled from it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.draft_trace import VerifiedTree
from specray.ops.attention import AttentionBatch
from specray.ops.sampling_state import TokenMask
from specray.ops.states import StateCopies
from specray.ops.step_tensors import RaggedIndex
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TreeRows
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.torch_step_ops import FlatTokens
from specray.step import StepPlan


class ScheduledBatch(NamedTuple):
    """The R scheduled requests of a step. Row r is the r-th request of the plan."""

    states: list[RequestState]
    num_known: list[int]  # known tokens to compute in this step, the root included
    sampling: list[int]  # rows whose known tokens are all computed after this step: they sample
    state_copies: list[Sequence[tuple[int, int]]]  # of each request, see ScheduledRequest
    host_roots: list[int]  # the host's copy of `roots`
    slots: Tensor  # int64 [R]
    starts: Tensor  # int64 [R], position of the first token to compute
    counts: Tensor  # int64 [R], num_known on the device
    last: Tensor  # int64 [R], positions of the last known tokens to compute: the roots
    roots: Tensor  # int64 [R], these tokens
    lengths: Tensor  # int64 [R], known tokens once these are computed: the positions that are sampled next

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
        roots = [state.token_ids[position] for state, position in zip(states, last, strict=True)]
        lengths = [position + 1 for position in last]
        columns = table.flush([row.slot for row in plan.rows], starts, num_known, last, roots, lengths)
        return cls(states, num_known, sampling, [row.state_copies for row in plan.rows], roots, *columns.unbind())

    @property
    def trees(self) -> TreeRows:
        """What a drafter's trees are chosen by."""
        slots = [state.slot for state in self.states]
        return TreeRows(self.slots, self.roots, list(zip(slots, self.host_roots, strict=True)))

    @property
    def are_all_sampling(self) -> bool:
        return len(self.sampling) == len(self.states)

    @property
    def only_decode(self) -> bool:
        """Whether every row's only known token is the root of its tree, and samples."""
        return self.are_all_sampling and max(self.num_known) == 1

    @property
    def has_grammar(self) -> bool:
        return any(state.sampling.options.grammar is not None for state in self.states)


class StepBatch(NamedTuple):
    """A step's rows and their trees."""

    rows: ScheduledBatch
    tree: DraftTree  # trees of all R rows
    num_nodes: list[int]  # the host's copy of tree.num_nodes
    mask: TokenMask | None = None  # mask of the logits of the rows that sample; None: no request has a grammar
    # None where `num_nodes` are the sizes; else they are upper bounds, and it returns the trees with their sizes
    wait_for_sizes: Callable[[], tuple[DraftTree, list[int]]] | None = None

    @property
    def roots(self) -> list[int]:
        """Places of the roots among the nodes of all trees, tree by tree."""
        return [0, *accumulate(self.num_nodes[:-1])]

    @property
    def state_copies(self) -> list[StateCopies]:
        """Of each request, see StateCopies."""
        pairs = zip(self.rows.states, self.rows.state_copies, strict=True)
        return [{place - state.num_computed_tokens: row for place, row in places} for state, places in pairs]

    def traced_tree(self, row: int) -> VerifiedTree:
        """A row's tree on the host: one more copy, for requests that ask for it."""
        count = self.num_nodes[row]
        return VerifiedTree(*torch.stack((self.tree.tokens[row, :count], self.tree.parents[row, :count])).tolist())

    def with_sizes(self) -> "StepBatch":
        """A copy with the trees' numbers of nodes; waits for the drafter."""
        if self.wait_for_sizes is None:
            return self
        tree, num_nodes = self.wait_for_sizes()
        return self._replace(tree=tree, num_nodes=num_nodes, wait_for_sizes=None)

    def decoding(self) -> "StepBatch":
        """The batch of the next step, in which each request has one known token and stores no state."""
        count = len(self.rows.states)
        return self._replace(rows=self.rows._replace(num_known=[1] * count, state_copies=[()] * count))


class InputBatch(NamedTuple):
    """A step's rows and trees, flattened to T tokens."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionBatch
    roots: list[int]  # place of each row's root; its nodes follow in order
    node_places: Tensor | None  # int64 [M], places of the nodes of the rows that sample; None: all T
    read_lens: list[int] | None = None  # the output of so many last tokens of each row is read; None: of all


def build_batch(table: RequestTable, batch: StepBatch) -> InputBatch:
    """Flatten rows and their trees."""
    rows, tree, num_nodes = batch.rows, batch.tree, batch.num_nodes
    lens = [known + nodes - 1 for known, nodes in zip(rows.num_known, num_nodes, strict=True)]
    kv_lens = [state.num_computed_tokens + length for state, length in zip(rows.states, lens, strict=True)]
    columns, trees = (rows.slots, rows.starts, rows.counts), (tree.tokens, tree.parents, tree.num_nodes)
    has_drafts = tree.max_depth > 0
    flat = FlatTokens(*table.ops.build_step(columns, trees, sum(lens), max(kv_lens), has_drafts))
    attention = AttentionBatch(
        lens,
        kv_lens,
        flat.kv_slots,
        flat.slot_mapping,
        [(count, count) if count > 1 else (0, 0) for count in num_nodes],
        flat.ancestors,
        are_chains=tree.are_chains,
    )
    roots = [end - count for end, count in zip(accumulate(lens), num_nodes, strict=True)]
    if rows.are_all_sampling and sum(lens) == sum(num_nodes):
        return InputBatch(flat.token_ids, flat.positions, attention, roots, None)
    sampling = np.array(rows.sampling, dtype=np.int64)
    num_sampled = int(np.array(num_nodes)[sampling].sum())
    selected = torch.from_numpy(sampling).to(table.device)
    nodes = RaggedIndex.of(tree.num_nodes.index_select(0, selected), num_sampled)
    node_places = flat.roots.index_select(0, selected).index_select(0, nodes.rows) + nodes.offsets
    read_lens = None if any(state.prompt_logprobs for state in rows.states) else num_nodes
    return InputBatch(flat.token_ids, flat.positions, attention, roots, node_places, read_lens)
