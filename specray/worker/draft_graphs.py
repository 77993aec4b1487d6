"""CUDA graphs of a drafter that has a step of its own, by bucket: in its own process, or one of several.

A graph drafts trees of at most its bucket's number of nodes, so a chain of three does not pay for seven levels. It fits
requests that committed at most that many tokens, and at most one more than the drafter's trees have levels. Rows behind
the requests are padding.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from specray.ops.graphs import Graphs
from specray.spec_decode.draft_tree import DraftTree, TreeBuffers
from specray.spec_decode.drafter import CompositeDrafter, DeviceDrafter, Drafter, device_drafter
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.torch_step_ops import TorchTable
from specray.worker.buckets import Bucket, draft_buckets, smallest_bucket
from specray.worker.padded_rows import PaddedRows

logger = logging.getLogger(__name__)


class DraftGraphs:
    """Graphs of `recorded`, which is `drafter` or a part of it, over requests of `table`."""

    def __init__(
        self,
        graphs: Graphs,
        drafter: Drafter,
        recorded: DeviceDrafter,
        table: RequestTable,
        hidden_size: int,
        dtype: torch.dtype,
        max_rows: int,
        name: str = "",
        goes_on: bool = False,
    ) -> None:
        """`hidden_size` and `dtype` are those of the target's hidden states; `name` is the drafter's, among several.

        `goes_on`: they may draft before the host has an outcome, because it adds nothing to their trees.
        """
        self.table, self._name, self._goes_on = table, name, goes_on
        self.last: DraftTree | None = None  # the trees of the last `replay`, if they were made
        self._graphs, self._recorded = graphs, recorded
        self._max_nodes = 1 + drafter.max_draft_tokens
        self._buckets = draft_buckets(max_rows, self._max_nodes)
        rows = max((bucket.rows for bucket in self._buckets), default=0)
        tokens = max((bucket.tokens for bucket in self._buckets), default=0)
        size = hidden_size * len(drafter.aux_hidden_state_layers)
        # Of each request: slot, committed tokens, place of the first one's state. Graphs keep what is loaded last.
        self._rows = torch.zeros(3, rows, dtype=torch.int64, device=table.device)
        self._rows[0] = table.padding_slot
        self._outcome = torch.zeros(rows, 2 + 2 * self._max_nodes, dtype=torch.int64, device=table.device)
        self._states = torch.zeros(tokens, size, dtype=dtype, device=table.device)
        self._drafts = TreeBuffers(rows, self._max_nodes, table.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first: then later ones find enough memory in the pool."""
        logger.info("capturing CUDA graphs of drafts in %d buckets", len(self._buckets))
        for bucket in self._buckets:
            for is_sampled in (False, True):
                self._graphs.capture(self._key(bucket, is_sampled), partial(self._draft, bucket, is_sampled))
        for nodes in {size for bucket in self._buckets for size in (1, bucket.nodes)}:  # each compiles a kernel
            self._commit(self._outcome.new_zeros(1, 2 + 2 * nodes))

    def early_nodes(self, num_requests: int) -> int:
        """Most nodes of a step's trees for `draft_early`; 0: it must not be called."""
        if not self._goes_on:
            return 0
        return max((bucket.nodes for bucket in self._buckets if bucket.rows >= num_requests), default=0)

    def draft_early(
        self, requests: Sequence[DraftRequest], num_nodes: int, read: Callable[[], tuple[Tensor, Tensor]]
    ) -> DraftTree:
        """Trees after a step that the host does not know the outcome of, which enters the table.

        The step's trees had up to `num_nodes` nodes, at most `early_nodes`. `read` returns its outcome (see EarlyStep)
        and hidden states, for which the device may wait from then on. A request that kept nothing, because the
        target's logits are not finite, gets its root alone.
        """
        slots, count = [request.slot for request in requests], len(requests)
        most = max(request.draft_limit.num_tokens for request in requests)
        bucket = smallest_bucket(self._buckets, count, num_nodes, drafted=min(1 + most, self._max_nodes))
        assert bucket is not None, "see `early_nodes`"
        self._load(bucket.rows, slots, [0] * count, range(0, count * num_nodes, num_nodes))
        outcome, states = read()
        self._load_states(states)
        kept = self._rows[1, :count].copy_(self._commit(outcome))
        tree = self._run(bucket, slots)
        return tree._replace(num_nodes=tree.num_nodes.where(kept > 0, 1))

    def replay(self, context: ProposeContext) -> Callable[[], DraftTree] | None:
        """`ProposeContext.replay` for a step; None if no graph fits it, or if it is one of another request table."""
        self.last = None
        if context.table is not self.table or context.unfinished or not context.requests:
            return None
        longest = max(request.end - request.start for request in context.requests)
        if longest > 1 + self._drafts.max_depth:  # a deeper tree of another drafter was accepted
            return None
        most = max(limit.num_tokens for limit in context.draft_limits)
        drafted = min(1 + most, self._max_nodes)
        bucket = smallest_bucket(self._buckets, len(context.requests), longest, drafted=drafted)
        return None if bucket is None else partial(self._replay, context, bucket)

    def _replay(self, context: ProposeContext, bucket: Bucket) -> DraftTree:
        counts = [request.end - request.start for request in context.requests]
        slots, firsts = [request.slot for request in context.requests], [0, *accumulate(counts[:-1])]
        self._load(bucket.rows, slots, counts, firsts)
        if (states := context.aux_hidden_states) is not None:
            self._load_states(states)
        self.last = self._run(bucket, slots)
        return self.last

    def _load(self, num_rows: int, slots: Sequence[int], counts: Sequence[int], firsts: Sequence[int]) -> None:
        """The rows of a graph of so many, by one copy to the device. Those behind the requests are padding."""
        empty = [0] * (num_rows - len(slots))
        padded = [*slots, *(self.table.padding_slot for _ in empty)], [*counts, *empty], [*firsts, *empty]
        self._rows[:, :num_rows].copy_(self.table.numbers(*padded))

    def _load_states(self, states: Tensor) -> None:
        if self._states.shape[1]:
            self._states[: len(states)].copy_(states)

    def _commit(self, outcome: Tensor) -> Tensor:
        """Append what the first rows have emitted to the table; int64 [R], how many tokens each one has kept."""
        ops, report = self.table.ops, self._outcome.view(-1)[: outcome.numel()].view_as(outcome)
        assert isinstance(ops, TorchTable), "the CPU kernels have no graphs"
        ops.commit(self._rows[0, : len(outcome)], outcome, report)
        return report[:, 0]

    def _run(self, bucket: Bucket, slots: Sequence[int]) -> DraftTree:
        is_sampled = any(self.table.states[slot].sampling.is_sampled for slot in slots)
        self._graphs.replay(self._key(bucket, is_sampled))
        return self._drafts.trees(len(slots), bucket.nodes)

    def _key(self, bucket: Bucket, is_sampled: bool) -> Hashable:
        return "draft", bucket, is_sampled, self._name

    def _draft(self, bucket: Bucket, is_sampled: bool) -> None:
        slots, counts, firsts = self._rows[:, : bucket.rows]
        places = firsts[:, None] + torch.arange(bucket.nodes, device=slots.device)
        padded = PaddedRows(self.table, slots, counts, places, self._states, is_sampled, num_drafts=bucket.nodes - 1)
        self._drafts.put(self._recorded.draft(padded))


def graphs_of_members(
    graphs: Graphs,
    composite: CompositeDrafter,
    table: RequestTable,
    hidden_size: int,
    dtype: torch.dtype,
    max_rows: int,
) -> list[str]:
    """Capture graphs for each of several drafters that can have any; returns those that cannot, and why."""
    without = []
    for name, member in composite.members.items():
        recorded = device_drafter(member)
        if isinstance(recorded, str):
            without.append(f"drafts of {name}: {recorded}")
            continue
        captured = DraftGraphs(graphs, member, recorded, table, hidden_size, dtype, max_rows, name)
        captured.capture()
        composite.replays[name] = captured.replay
    return without
