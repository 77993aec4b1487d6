"""The states of the requests of one rank, beside the KV cache, for layers that have states instead of KV.

See `specray.ops.states` for what a step does with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.attention import Attend, make_zeros
from specray.ops.states import PaddedStateRows, StatefulAttend, StateOperation, StatePass, StateRows, StateShape
from specray.ops.step_tensors import RaggedIndex, nodes_of, num_kept, ragged_places
from specray.spec_decode.draft_tree import DraftTree
from specray.step import NewRequest
from specray.worker.input_batch import StepBatch


class StatePool:
    """A state of each operation for each slot of the request table, and behind these rows, for the prefix cache."""

    def __init__(self, shapes: Sequence[StateShape], num_rows: int, device: torch.device) -> None:
        self.shapes = shapes
        self.pools = [make_zeros((num_rows, *state.shape), state.dtype, device) for state in shapes]
        self._pass = StatePass(self.pools, StateRows.apart(0))

    def enter(self, new_requests: Sequence[NewRequest]) -> None:
        """Give requests the stored states behind their cached tokens. What comes later may overwrite these."""
        for new in new_requests:
            if new.stored_state >= 0:
                for pool in self.pools:
                    pool[new.slot] = pool[new.stored_state]

    def start(self, batch: StepBatch) -> None:
        """Prepare the next pass, which is the step's."""
        rows, parents = batch.rows, None
        if batch.tree.max_depth:
            parents = batch.tree.parents.tolist()  # a copy to the host, where each operation is planned
        lens = [known + nodes - 1 for known, nodes in zip(rows.num_known, batch.num_nodes, strict=True)]
        slots = [state.slot for state in rows.states]
        is_fresh = [state.num_computed_tokens == 0 for state in rows.states]
        copies = batch.state_copies
        state_rows = StateRows.of(slots, lens, rows.num_known, is_fresh, parents, copies)
        self._pass = StatePass(self.pools, state_rows, copies)

    def attending(self, attend: Attend) -> StatefulAttend:
        """The `attend` of the prepared pass, with its states."""
        return StatefulAttend(attend, self._pass)

    @property
    def is_complete(self) -> bool:
        """Whether every operation of the prepared pass has run."""
        return self._pass.is_complete

    def commit(self, accepted: Sequence[Sequence[int]]) -> None:
        """Bring the states of the step's requests behind their accepted drafts, see StatePass."""
        self._pass.commit(accepted)


class PaddedStates:
    """The states of decode steps of up to `max_tokens` nodes in all, see PaddedStep.

    Between `attending` and `commit` it keeps what the operations read of the step's nodes.
    """

    def __init__(self, states: StatePool, max_rows: int, max_nodes: int, max_tokens: int, dtype: torch.dtype) -> None:
        device = states.pools[0].device
        self._pools = states.pools
        self._inputs = [
            torch.zeros(max_tokens + 1, shape.num_inputs, dtype=dtype, device=device)  # padding begins behind all nodes
            for shape in states.shapes
        ]
        self._copies = torch.full((max_rows, max_nodes), -1, dtype=torch.int64, device=device)
        self._has_copies = False
        self._operations: list[tuple[StateOperation, list[int]]] = []  # of the pools, and the widths of their inputs

    def load(self, batch: StepBatch) -> None:
        """Make the copies for the prefix cache those of `batch`; a copy to the device, if there are any."""
        has_copies = any(batch.rows.state_copies)
        if not has_copies and not self._has_copies:
            return
        self._has_copies = has_copies
        packed = torch.full_like(self._copies, -1, device="cpu")
        for place, of_request in enumerate(batch.state_copies):
            for count, row in of_request.items():
                if 0 < count <= packed.shape[1]:
                    packed[place, count - 1] = row
        self._copies.copy_(packed)

    def attending(
        self, attend: Attend, slots: Tensor, is_request: Tensor, lengths: Tensor, tree: DraftTree, total: int
    ) -> Attend:
        """`attend` with the states of a pass over trees of R requests, whose known tokens are `lengths` int64 [R].

        The trees' nodes are `total` at most. `slots` are those of the pools; rows without `is_request` are padding.
        """
        count, width = tree.tokens.shape
        sees = tree.ancestors() if width > 1 else None
        copies, is_fresh, places = self._copies[:count, :width], lengths <= 1, _places(tree.num_nodes, width, total)
        rows = PaddedStateRows(slots, is_request.long(), is_fresh, tree.parents, copies, sees, places)
        self._operations = []
        return StatefulAttend(attend, _PaddedPass(self, rows))

    def run(self, operation: StateOperation, inputs: Sequence[Tensor], rows: PaddedStateRows) -> Tensor:
        """The next operation of the pass."""
        place = len(self._operations)
        self._operations.append((operation, [part.shape[1] for part in inputs]))
        torch.cat(list(inputs), 1, out=self._inputs[place][: rows.total])
        return operation(inputs, self._pools[place], rows)

    def commit(self, slots: Tensor, is_request: Tensor, outcome: Tensor, starts: Tensor, total: int) -> None:
        """Bring the states behind the accepted drafts of trees; `outcome` is that of StepOutput.

        `starts` int64 [R] are the places of the trees' roots among the nodes of all, `total` at most.
        """
        count = len(slots)
        num_accepted = torch.where(is_request, num_kept(outcome) - 1, 0).clamp(min=0)
        nodes = nodes_of(outcome)[:, 1:]
        width = nodes.shape[1]
        places = _places(num_accepted, width, total)
        accepted = (starts[:, None] + nodes).flatten().index_select(0, places[1])
        chain = torch.arange(-1, width - 1, device=slots.device).expand(count, -1)
        is_fresh, copies = torch.zeros_like(is_request), self._copies[:count, 1 : 1 + width]
        rows = PaddedStateRows(slots, num_accepted, is_fresh, chain, copies, places=places)
        for (operation, widths), inputs, pool in zip(self._operations, self._inputs, self._pools, strict=True):
            operation(inputs.index_select(0, accepted).split_with_sizes(widths, 1), pool, rows)


def _places(lengths: Tensor, width: int, total: int) -> tuple[Tensor, Tensor]:
    """`PaddedStateRows.places` of `lengths` int64 [R] rows, one request after the other, with room for `total`."""
    index = RaggedIndex.of(lengths, total)
    return ragged_places(lengths, width, total), index.rows * width + index.offsets.clamp(max=width - 1)


class _PaddedPass:
    """Implements `States`."""

    def __init__(self, states: PaddedStates, rows: PaddedStateRows) -> None:
        self._states, self._rows = states, rows

    def run(self, operation: StateOperation, *inputs: Tensor) -> Tensor:
        return self._states.run(operation, inputs, self._rows)
