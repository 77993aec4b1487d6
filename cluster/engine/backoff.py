"""How long a client that finds the queue full should stay away: as long as those that wait now need to start.

Not here: when a queue is full (`specray.engine.scheduler`), and the header (`openai.errors`).
"""

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from specray.metrics import Snapshot, number

MAX_S = 60


class _Count(NamedTuple):
    at: float
    num_ended: float


class Backoff:
    """Watches how fast requests end, over the last `size` snapshots."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: deque[_Count] = deque(maxlen=size)

    def note(self, snapshot: Snapshot) -> None:
        by_reason = snapshot["specray_request_finished_total"]
        assert isinstance(by_reason, dict)
        self._counts.append(_Count(self._clock(), sum(by_reason.values())))

    def retry_after_s(self, snapshot: Snapshot) -> int:
        """Whole seconds from 1 to MAX_S. Where none ended, at least as long again as none did."""
        if not self._counts:
            return 1
        first, last = self._counts[0], self._counts[-1]
        seconds, num_ended = self._clock() - first.at, last.num_ended - first.num_ended
        num_waiting = number(snapshot, "specray_num_requests_waiting")
        return min(MAX_S, max(1, ceil(seconds * num_waiting / num_ended if num_ended else seconds)))
