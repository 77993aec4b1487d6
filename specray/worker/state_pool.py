"""The states of the requests of one rank, beside the KV cache, for layers that have states instead of KV.

See `specray.ops.states` for what a step does with them.
"""

from collections.abc import Sequence

import torch

from specray.ops.attention import Attend, make_zeros
from specray.ops.states import StatefulAttend, StatePass, StateRows, StateShape
from specray.step import NewRequest
from specray.worker.input_batch import StepBatch


class StatePool:
    """A state of each operation for each slot of the request table, and behind these rows, for the prefix cache."""

    def __init__(self, shapes: Sequence[StateShape], num_rows: int, device: torch.device) -> None:
        self._pools = [make_zeros((num_rows, *state.shape), state.dtype, device) for state in shapes]
        self._pass = StatePass(self._pools, StateRows.apart(0))

    def enter(self, new_requests: Sequence[NewRequest]) -> None:
        """Give requests the stored states behind their cached tokens. What comes later may overwrite these."""
        for new in new_requests:
            if new.stored_state >= 0:
                for pool in self._pools:
                    pool[new.slot] = pool[new.stored_state]

    def start(self, batch: StepBatch) -> None:
        """Prepare the next pass, which is the step's."""
        rows, parents = batch.rows, None
        if batch.tree.max_depth:
            parents = batch.tree.parents.tolist()  # a copy to the host, where each operation is planned
        lens = [known + nodes - 1 for known, nodes in zip(rows.num_known, batch.num_nodes, strict=True)]
        slots = [state.slot for state in rows.states]
        is_fresh = [state.num_computed_tokens == 0 for state in rows.states]
        copies = [
            {position - state.num_computed_tokens: row for position, row in places}
            for state, places in zip(rows.states, rows.state_copies, strict=True)
        ]
        state_rows = StateRows.of(slots, lens, rows.num_known, is_fresh, parents, copies)
        self._pass = StatePass(self._pools, state_rows, copies)

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
