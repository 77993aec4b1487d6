"""A record of the KV slots that a drafter has written in its own pool.

A drafter's KV lies in the same KV slots as the target's. A drafter that joined late or missed a step has not written
all of them, and attends only to those that it has.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable


class _Request(NamedTuple):
    """What is known of a request, so that a step need not look at each of its positions."""

    state: RequestState | None = None
    num_complete: int = 0  # all positions before it are written
    end: int = 0  # no position from here to before `num_cleared` is
    num_cleared: int = 0


class WrittenSlots:
    """A record by KV slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._is_written = np.zeros(num_slots, dtype=bool)
        self._requests: dict[int, _Request] = {}  # by slot

    def update(self, table: RequestTable, requests: Sequence[DraftRequest], starts: Sequence[int]) -> None:
        """Record positions from `starts` to `end` as written, and others from the requests' `start` on as not written.

        The latter hold KV of another request or of rejected nodes.
        """
        for request, start in zip(requests, starts, strict=True):
            known, state, start = self._known(table, request), table.states[request.slot], max(start, request.start)
            kv_slots = table.host_kv_slots[request.slot]
            first = known.num_cleared if known.end == request.start else request.start
            if first < state.num_kv_slots:
                self._is_written[kv_slots[first : state.num_kv_slots]] = False
            if start < request.end:
                self._is_written[kv_slots[start : request.end]] = True
            complete = min(known.num_complete, request.start)
            complete = request.end if complete == start else complete
            self._requests[request.slot] = _Request(state, complete, request.end, state.num_kv_slots)

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
        known = self._known(table, request)
        if known.num_complete >= request.end:
            return True
        is_written = bool(self._is_written[table.host_kv_slots[request.slot, first : request.end]].all())
        if is_written and first == 0:
            self._requests[request.slot] = known._replace(state=table.states[request.slot], num_complete=request.end)
        return is_written

    def _known(self, table: RequestTable, request: DraftRequest) -> _Request:
        known = self._requests.get(request.slot)
        return known if known is not None and known.state is table.states[request.slot] else _Request()
