"""A record of the KV slots that a drafter has written in its own pool.

A drafter's KV lies in the same KV slots as the target's. A drafter that joined late or missed a step has not written
all of them, and attends only to those that it has.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.request_table import RequestTable


class WrittenSlots:
    """A record by KV slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._is_written = np.zeros(num_slots, dtype=bool)

    def update(self, table: RequestTable, requests: Sequence[DraftRequest], starts: Sequence[int]) -> None:
        """Record positions from `starts` to `end` as written, and others from the requests' `start` on as not written.

        The latter hold KV of another request or of rejected nodes.
        """
        for request, start in zip(requests, starts, strict=True):
            kv_slots = table.host_kv_slots[request.slot, : table.states[request.slot].num_kv_slots]
            self._is_written[kv_slots[request.start :]] = False
            self._is_written[kv_slots[max(start, request.start) : request.end]] = True

    def has(self, table: RequestTable, requests: Sequence[DraftRequest], positions: Sequence[int]) -> np.ndarray:
        """bool [R]: whether the KV slot at a position of each request is written."""
        slots = [request.slot for request in requests]
        written: np.ndarray = self._is_written[table.host_kv_slots[slots, list(positions)]]
        return written

    def are_all(self, table: RequestTable, requests: Sequence[DraftRequest], first: int = 0) -> bool:
        """Whether all positions of the requests from `first` to before `end` are written."""
        kv_slots = (table.host_kv_slots[request.slot, first : request.end] for request in requests)
        return all(self._is_written[each].all() for each in kv_slots)

    def visible(self, table: RequestTable, slots: Tensor, requests: Sequence[DraftRequest]) -> tuple[Tensor, list[int]]:
        """(KV slots int64 [R, n], how many) of each request's positions before `end` that are written, in order.

        `slots` is int64 [R] on the device, those of `requests`.
        """
        ends = np.array([request.end for request in requests])
        width = int(ends.max())
        if self.are_all(table, requests):
            return table.ops.kv_slots(slots, None, width), ends.tolist()
        kv_slots = table.host_kv_slots[[request.slot for request in requests], :width]
        is_inside = np.arange(width) < ends[:, None]
        is_visible = self._is_written[kv_slots] & is_inside
        order = np.argsort(~is_visible, axis=1, kind="stable")
        packed = np.take_along_axis(kv_slots, order, 1).astype(np.int64)
        return torch.from_numpy(packed).to(slots.device), is_visible.sum(1).tolist()
