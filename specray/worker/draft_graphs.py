"""CUDA graphs of a drafter that has a step of its own, by bucket: in its own process, or one of several.

A graph drafts trees of at most its bucket's number of nodes, so a chain of three does not pay for seven levels. It fits
requests that committed at most that many tokens, and at most one more than the drafter's trees have levels. Rows behind
the requests are padding.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial

import torch

from specray.ops.graphs import Graphs
from specray.spec_decode.draft_tree import DraftTree, TreeBuffers
from specray.spec_decode.drafter import CompositeDrafter, DeviceDrafter, Drafter, device_drafter
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_table import RequestTable
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
    ) -> None:
        """`hidden_size` and `dtype` are those of the target's hidden states; `name` is the drafter's, among several."""
        self.table, self._name = table, name
        self._graphs, self._recorded = graphs, recorded
        self._max_nodes = 1 + drafter.max_draft_tokens
        self._buckets = draft_buckets(max_rows, self._max_nodes)
        rows = max((bucket.rows for bucket in self._buckets), default=0)
        tokens = max((bucket.num_tokens for bucket in self._buckets), default=0)
        size = hidden_size * len(drafter.aux_hidden_state_layers)
        padding = torch.tensor([table.padding_slot, 0, 0]).to(table.device)  # slot, start, end
        self._padding = padding[:, None].repeat(1, rows)
        self._bounds = self._padding.clone()
        self._states = torch.zeros(tokens, size, dtype=dtype, device=table.device)
        self._drafts = TreeBuffers(rows, self._max_nodes, table.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first: then later ones find enough memory in the pool."""
        logger.info("capturing CUDA graphs of drafts in %d buckets", len(self._buckets))
        for bucket in self._buckets:
            for is_sampled in (False, True):
                self._graphs.capture(self._key(bucket, is_sampled), partial(self._draft, bucket, is_sampled))

    def replay(self, context: ProposeContext) -> Callable[[], DraftTree] | None:
        """`ProposeContext.replay` for a step; None if no graph fits it, or if it is one of another request table."""
        if context.table is not self.table or context.unfinished or not context.requests:
            return None
        longest = max(request.end - request.start for request in context.requests)
        if longest > 1 + self._drafts.max_depth:  # a deeper tree of another drafter was accepted
            return None
        most = max(limit.num_tokens for limit in context.draft_limits)
        bucket = smallest_bucket(self._buckets, len(context.requests), longest, min(1 + most, self._max_nodes))
        return None if bucket is None else partial(self._replay, context, bucket)

    def _replay(self, context: ProposeContext, bucket: Bucket) -> DraftTree:
        self._load(context, bucket.rows)
        self._graphs.replay(self._key(bucket, any(context.are_sampled(context.requests))))
        return self._drafts.trees(len(context.requests), bucket.nodes)

    def _load(self, context: ProposeContext, rows: int) -> None:
        """What a graph of `rows` rows reads, without waiting for the device. Rows behind the requests are padding."""
        count = len(context.requests)
        self._bounds[:, :count].copy_(context.bounds)
        self._bounds[:, count:rows].copy_(self._padding[:, count:rows])
        if (states := context.aux_hidden_states) is not None and self._states.shape[1]:
            self._states[: len(states)].copy_(states)

    def _key(self, bucket: Bucket, is_sampled: bool) -> Hashable:
        return "draft", bucket, is_sampled, self._name

    def _draft(self, bucket: Bucket, is_sampled: bool) -> None:
        slots, starts, ends = self._bounds[:, : bucket.rows]
        counts = ends - starts
        row, depth = (torch.arange(size, device=slots.device) for size in bucket)
        # Places in each row's part of the states, which here lie one behind the other.
        nodes = (counts.cumsum(0) - counts - row * bucket.nodes)[:, None] + depth
        states = self._states[: bucket.num_tokens]
        padded = PaddedRows(self.table, slots, counts, nodes, states, is_sampled, num_drafts=bucket.nodes - 1)
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
