"""Outcomes of steps, and the trees that a drafter makes after them, in the memory of a GPU that it shares by CUDA IPC.

The target's stream writes the outcome of a step to the region of an early order (see `Order`) and records an event, for
which the drafter's stream waits.
The drafter's stream writes the trees of an order to the order's region, and then the order's number. The target's
stream waits for this number, up to a limit that the GPU's clock measures, so no host waits: a drafter that is late,
dead or frozen costs the step its drafts. A region with another number has no trees for this step. Numbers are never
used twice, so trees that a replaced drafter still writes are not taken for its successor's. The trees are checked like
those of a drafter in the target's process (`PendingTrees`), after they were copied.
"""

import math
from typing import Any

import msgpack
import torch
from torch import Tensor

from specray.ops.host_copy import HostCopy
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.step_ops import step_ops
from specray.worker.remote_drafter.device_ring import DeviceRing, opened, opened_events, shared, shared_events
from specray.worker.remote_drafter.ring import NUM_REGIONS


class DeviceTrees:
    """Regions of up to R requests with trees of up to N nodes.

    `memory` is int64 [NUM_REGIONS, 2, 1 + R, 2 + 2 * N]. The target writes the first half of a region, which are the
    rows of an outcome. The first cell of the other half is the number of the trees there; each row behind it has a
    tree's number of nodes, a cell for alignment (Triton compiles a kernel again for other alignments), its tokens and
    its parents. `events` tell that an outcome was written.
    """

    def __init__(self, memory: Tensor, events: list[Any]) -> None:
        self._whole, self._events = memory, events
        self._outcomes, self._memory = memory.unbind(1)
        self._most_nodes = memory.shape[3] // 2 - 1
        self._ops = step_ops(memory.device)

    @classmethod
    def make(cls, num_rows: int, most_nodes: int, device: torch.device) -> "DeviceTrees":
        """The target's end. The memory is the target's."""
        with torch.inference_mode(False):
            memory = torch.zeros(_shape(num_rows, most_nodes), dtype=torch.int64, device=device)
        return cls(memory, shared_events())

    def export(self) -> bytes:
        """What the other process opens them with. RuntimeError if the memory cannot be shared."""
        data: bytes = msgpack.packb((shared(self._whole), [event.ipc_handle() for event in self._events]))
        return data

    @classmethod
    def open(cls, data: bytes, num_rows: int, most_nodes: int, device: torch.device) -> "DeviceTrees":
        """The drafter's end, on the same GPU."""
        memory, handles = msgpack.unpackb(data)
        opened_memory = opened(memory, _shape(num_rows, most_nodes), torch.int64, device)
        return cls(opened_memory, opened_events(handles, device))

    def put_outcome(self, region: int, outcome: Tensor) -> None:
        """The target's outcome int64 [B, 2 + 2 * n] of a step with trees of n <= N nodes; see StepOutput."""
        num_rows, width = outcome.shape
        self._outcomes[region, :num_rows, :width].copy_(outcome)
        self._events[region].record()

    def outcome(self, region: int, num_rows: int, num_nodes: int) -> Tensor:
        """It, for work on the drafter's current stream."""
        self._events[region].wait()
        return self._outcomes[region, :num_rows, : 2 + 2 * num_nodes]

    def put(self, region: int, number: int, tree: DraftTree | None) -> None:
        """The drafter's reply to the order with this number; None: it could not draft."""
        rows = self._memory[region, 1:]
        if tree is None:
            rows[:, 0].fill_(NONE)
        else:
            num_trees, width = len(tree.tokens), min(tree.tokens.shape[1], self._most_nodes)
            rows[:num_trees, 0].copy_(tree.num_nodes)
            for place, part in zip(self._nodes_of(rows), (tree.tokens, tree.parents), strict=True):
                place[:num_trees, :width].copy_(part[:, :width])
        self._ops.release_trees(self._memory[region, 0, :1], number)

    def get(self, region: int, number: int, num_trees: int, timeout_s: float) -> tuple[DraftTree, HostCopy]:
        """(the trees of an order, which no longer change until the region's next order; int64 [1] whether in time).

        If they were not, all have NONE nodes.
        """
        tree = self.unread(region, num_trees)
        flag, most = self._memory[region, 0, :1], self._most_nodes
        num_nodes, in_time = self._ops.await_trees(flag, tree.num_nodes, most, number, timeout_s)
        return tree._replace(num_nodes=num_nodes), HostCopy(in_time)

    def unread(self, region: int, num_trees: int) -> DraftTree:
        """The trees of an order, which are there only after `get`."""
        rows = self._memory[region, 1 : 1 + num_trees]
        return DraftTree(*self._nodes_of(rows), rows[:, 0], self._most_nodes - 1)

    def _nodes_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, parents) of rows of a region."""
        tokens, parents = rows[:, 2:].chunk(2, 1)
        return tokens, parents


class DeviceMemory:
    """What a rank shares with its drafters, each of which opens it. It lasts as long as the rank.

    CUDA does not free memory that another process opened and was killed before it closed, so it is used again.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """For up to `num_rows` requests, and hidden states of type `dtype`."""
        self._num_rows, self._dtype, self._device = num_rows, dtype, device
        self._rings: list[DeviceRing] = []
        self._trees: dict[int, DeviceTrees] = {}

    def ring(self, tokens: int, width: int) -> DeviceRing | None:
        """A ring for regions of at least [tokens, width]; None if no hidden states are read."""
        if not width:
            return None
        for ring in self._rings:
            if ring.num_tokens >= tokens and ring.regions[0].shape[1] == width:
                return ring
        self._rings.append(DeviceRing.make(tokens, width, self._dtype, self._device))
        return self._rings[-1]

    def trees(self, most_nodes: int) -> DeviceTrees:
        if most_nodes not in self._trees:
            self._trees[most_nodes] = DeviceTrees.make(self._num_rows, most_nodes, self._device)
        return self._trees[most_nodes]


def tree_bytes(num_rows: int, most_nodes: int) -> int:
    """Of the regions of up to `num_rows` requests with trees of up to `most_nodes` nodes."""
    return math.prod(_shape(num_rows, most_nodes)) * torch.int64.itemsize


def _shape(num_rows: int, most_nodes: int) -> tuple[int, int, int, int]:
    return NUM_REGIONS, 2, 1 + num_rows, 2 + 2 * most_nodes
