"""A record of the KV slots that a drafter has written in its own pool.

A drafter's KV lies in the same KV slots as the target's. A drafter that joined late or missed a step has not written
all of them, and attends only to those that it has.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable


class WrittenSlots:
    """A record by KV slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._is_written = np.zeros(num_slots, dtype=bool)
        # By slot: all positions of this request before the number are written. Saves a look at each in every step.
        self._complete: dict[int, tuple[RequestState, int]] = {}

    def update(self, table: RequestTable, requests: Sequence[DraftRequest], starts: Sequence[int]) -> None:
        """Record positions from `starts` to `end` as written, and others from the requests' `start` on as not written.

        The latter hold KV of another request or of rejected nodes.
        """
        for request, start in zip(requests, starts, strict=True):
            state, start = table.states[request.slot], max(start, request.start)
            kv_slots = table.host_kv_slots[request.slot, request.start : state.num_kv_slots]
            self._is_written[kv_slots] = False
            self._is_written[kv_slots[start - request.start : request.end - request.start]] = True
            complete = min(self._num_complete(table, request), request.start)
            self._complete[request.slot] = state, request.end if complete == start else complete

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
        if self._num_complete(table, request) >= request.end:
            return True
        is_written = bool(self._is_written[table.host_kv_slots[request.slot, first : request.end]].all())
        if is_written and first == 0:
            self._complete[request.slot] = table.states[request.slot], request.end
        return is_written

    def _num_complete(self, table: RequestTable, request: DraftRequest) -> int:
        state, num_complete = self._complete.get(request.slot, (None, 0))
        return num_complete if state is table.states[request.slot] else 0
