"""CUDA graphs of a drafter that has a step of its own, by number of requests: in its own process, or one of several.

A graph drafts for requests that committed no more tokens than a tree is deep, which is every decode step. Rows behind
the requests are padding.
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch

from specray.ops.graphs import Graphs
from specray.spec_decode.draft_tree import DraftTree, TreeBuffers
from specray.spec_decode.drafter import CompositeDrafter, DeviceDrafter, Drafter, device_drafter
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.worker.buckets import draft_row_buckets
from specray.worker.padded_rows import PaddedRows


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
        self._width = width = 1 + drafter.max_draft_tokens
        self._buckets = draft_row_buckets(max_rows, width)
        rows, size = max(self._buckets, default=0), hidden_size * len(drafter.aux_hidden_state_layers)
        padding = torch.tensor([table.padding_slot, 0, 0]).to(table.device)  # slot, start, end
        self._padding = padding[:, None].repeat(1, rows)
        self._bounds = self._padding.clone()
        self._states = torch.zeros(rows * width, size, dtype=dtype, device=table.device)
        self._drafts = TreeBuffers(rows, width, table.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first: then later ones find enough memory in the pool."""
        for rows in reversed(self._buckets):
            for is_sampled in (False, True):
                self._graphs.capture(self._key(rows, is_sampled), partial(self._draft, rows, is_sampled))

    def replay(self, context: ProposeContext) -> Callable[[], DraftTree] | None:
        """`ProposeContext.replay` for a step; None if no graph fits it, or if it is one of another request table."""
        if context.table is not self.table:
            return None
        lengths = [request.end - request.start for request in context.requests]
        fits = lengths and not context.unfinished and max(lengths) <= 1 + self._drafts.max_depth
        rows = next((rows for rows in self._buckets if rows >= len(lengths)), None) if fits else None
        return None if rows is None else partial(self._replay, context, rows, lengths)

    def _replay(self, context: ProposeContext, rows: int, lengths: list[int]) -> DraftTree:
        self._load(context, rows)
        states = (context.table.states[request.slot].sampling for request in context.requests)
        self._graphs.replay(self._key(rows, any(state.is_sampled for state in states)))
        return self._drafts.trees(len(lengths))

    def _load(self, context: ProposeContext, rows: int) -> None:
        """What a graph of `rows` rows reads, without waiting for the device. Rows behind the requests are padding."""
        count = len(context.requests)
        self._bounds[:, :count].copy_(context.bounds)
        self._bounds[:, count:rows].copy_(self._padding[:, count:rows])
        if (states := context.aux_hidden_states) is not None and self._states.shape[1]:
            self._states[: len(states)].copy_(states)

    def _key(self, rows: int, is_sampled: bool) -> Hashable:
        return "draft", rows, is_sampled, self._name

    def _draft(self, rows: int, is_sampled: bool) -> None:
        slots, starts, ends = self._bounds[:, :rows]
        counts = ends - starts
        row, depth = (torch.arange(size, device=slots.device) for size in (rows, self._width))
        # Places in each row's part of the states, which here lie one behind the other.
        nodes = (counts.cumsum(0) - counts - row * self._width)[:, None] + depth
        states = self._states[: rows * self._width]
        padded = PaddedRows(self.table, slots, counts, nodes, states, is_sampled, num_drafts=self._width - 1)
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
