"""Deadlines of a process that may stall itself: its event loop, or with its whole machine.

During a stall messages wait in its sockets, nobody beats, and every deadline passes. It must not look like the death of
the other side, so it counts as one poll interval only. Whoever watches another process uses these.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cluster.liveness.heartbeat import Heartbeat

NUM_PARTS = 6  # of a deadline; a stall uses up one of them

T = TypeVar("T")


class SilenceWatch:
    """The silence of a heartbeat as observed by polls every `interval_s` seconds."""

    def __init__(self, heartbeat: Heartbeat, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._interval_s = interval_s
        self._clock = clock
        self._polled_at = clock()
        self._silence_s = 0.0

    def poll(self) -> float:
        """Seconds of silence. A poll that comes late adds one interval, because its loop could receive nothing."""
        now = self._clock()
        elapsed_s, self._polled_at = now - self._polled_at, now
        observed_s = self._interval_s if elapsed_s > 2 * self._interval_s else elapsed_s
        has_beaten = self._heartbeat.silence_s < elapsed_s
        self._silence_s = min(self._heartbeat.silence_s, observed_s) if has_beaten else self._silence_s + observed_s
        return self._silence_s


def wait_until_silent(heartbeat: Heartbeat, deadline_s: float, poll_interval_s: float) -> None:
    """Block until the heartbeat has been silent for `deadline_s` seconds in which this process ran."""
    watch = SilenceWatch(heartbeat, poll_interval_s)
    while watch.poll() <= deadline_s:
        time.sleep(poll_interval_s)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. TimeoutError after `seconds` in which this event loop ran; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(NUM_PARTS):
            if (await asyncio.wait([task], timeout=seconds / NUM_PARTS))[0]:
                return task.result()
        raise TimeoutError(f"no answer within {seconds:g} s")
    finally:
        task.cancel()
