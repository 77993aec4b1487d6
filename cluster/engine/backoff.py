"""The Retry-After of a full queue: the time until the requests now waiting are expected to have started."""

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from specray.metrics import Snapshot, number

MAX_S = 60


class _Count(NamedTuple):
    at: float
    num_finished: float


class Backoff:
    """Measures the rate of finished requests over the last `size` snapshots."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: deque[_Count] = deque(maxlen=size)

    def record(self, snapshot: Snapshot) -> None:
        by_reason = snapshot["specray_request_finished_total"]
        assert isinstance(by_reason, dict)
        self._counts.append(_Count(self._clock(), sum(by_reason.values())))

    def retry_after_s(self, snapshot: Snapshot) -> int:
        """Whole seconds from 1 to MAX_S. If no request finished in the measured time, that time."""
        if not self._counts:
            return 1
        first, last = self._counts[0], self._counts[-1]
        seconds, num_finished = self._clock() - first.at, last.num_finished - first.num_finished
        num_waiting = number(snapshot, "specray_num_requests_waiting")
        return min(MAX_S, max(1, ceil(seconds * num_waiting / num_finished if num_finished else seconds)))
