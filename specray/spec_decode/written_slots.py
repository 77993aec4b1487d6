"""A record of the KV slots that a drafter has written in its own pool.

A drafter's KV lies in the same KV slots as the target's. A drafter that joined late or missed a step has not written
all of them, and attends only to those that it has.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable


class WrittenSlots:
    """A record by KV slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._is_written = np.zeros(num_slots, dtype=bool)
        # By slot: a request, and the position before which all are written, so that no step looks at each of them.
        self._complete: dict[int, tuple[RequestState, int]] = {}

    def update(self, table: RequestTable, requests: Sequence[DraftRequest], starts: Sequence[int]) -> None:
        """Record positions from `starts` to `end` as written, and others from the requests' `start` on as not written.

        The latter hold KV of another request or of rejected nodes.
        """
        for request, start in zip(requests, starts, strict=True):
            state, kv_slots = table.states[request.slot], table.host_kv_slots[request.slot]
            start = max(start, request.start)
            self._is_written[kv_slots[request.start : state.num_kv_slots]] = False
            self._is_written[kv_slots[start : request.end]] = True
            complete = min(self._num_complete(state), request.start)
            self._complete[request.slot] = state, request.end if complete == start else complete

    def read(self, context: ProposeContext) -> None:
        """Record what a drafter has written once it has read all tokens that the step of `context` committed."""
        self.forget(context.missed_kv_slots)
        requests = context.requests + context.unfinished
        self.update(context.table, requests, [request.start for request in requests])

    def forget(self, kv_slots: Collection[int]) -> None:
        """Record these as not written: others have got them."""
        if kv_slots:
            self._is_written[list(kv_slots)] = False

    def has(self, table: RequestTable, requests: Sequence[DraftRequest], positions: Sequence[int]) -> np.ndarray:
        """bool [R]: whether the KV slot at a position of each request is written."""
        slots = [request.slot for request in requests]
        written: np.ndarray = self._is_written[table.host_kv_slots[slots, list(positions)]]
        return written

    def are_all(self, table: RequestTable, requests: Sequence[DraftRequest], first: int = 0) -> bool:
        """Whether all positions of the requests from `first` to before `end` are written."""
        return all(self._is_complete(table, request, first) for request in requests)

    def visible(self, table: RequestTable, slots: Tensor, requests: Sequence[DraftRequest]) -> tuple[Tensor, list[int]]:
        """(KV slots int64 [R, n], how many) of each request's positions before `end` that are written, in order.

        `slots` is int64 [R] on the device, those of `requests`.
        """
        ends = [request.end for request in requests]
        width = max(ends)
        if self.are_all(table, requests):
            return table.ops.kv_slots(slots, None, width), ends
        kv_slots = table.host_kv_slots[[request.slot for request in requests], :width]
        is_inside = np.arange(width) < np.array(ends)[:, None]
        is_visible = self._is_written[kv_slots] & is_inside
        order = np.argsort(~is_visible, axis=1, kind="stable")
        packed = np.take_along_axis(kv_slots, order, 1).astype(np.int64)
        return torch.from_numpy(packed).to(slots.device), is_visible.sum(1).tolist()

    def _is_complete(self, table: RequestTable, request: DraftRequest, first: int) -> bool:
        state = table.states[request.slot]
        if self._num_complete(state) >= request.end:
            return True
        is_written = bool(self._is_written[table.host_kv_slots[request.slot, first : request.end]].all())
        if is_written and first == 0:
            self._complete[request.slot] = state, request.end
        return is_written

    def _num_complete(self, state: RequestState) -> int:
        known, num_complete = self._complete.get(state.slot, (None, 0))
        return num_complete if known is state else 0
