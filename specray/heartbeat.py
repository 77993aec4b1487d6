"""Heartbeats: a watcher compares the time since the last heartbeat of a process or connection with a deadline.

`LocalHeartbeat` is for watchers that observe activity themselves, such as received messages or generated tokens.
`HeartbeatFile` is for watching another process on the same machine.

A watcher may stall itself: its event loop, or with its whole machine. During a stall messages wait in its sockets,
nobody beats, and every deadline passes. It must not look like the death of the other side, so `SilenceWatch`,
`wait_until_silent` and `within` count it as one poll interval only.
"""

import asyncio
import mmap
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

HEARTBEAT_INTERVAL_S = 0.25  # of processes that beat in a file
_LAST_BEAT = struct.Struct("=qq")  # process ID, and nanoseconds on the monotonic clock, which all processes share
_LOADED = _LAST_BEAT.size  # offset of a byte that is 0 until the process has loaded
NUM_PARTS = 6  # of a deadline; a stall uses up one of them

T = TypeVar("T")


class Heartbeat(ABC):
    """The time of the last heartbeat of one process, connection or activity."""

    @abstractmethod
    def beat(self) -> None:
        """Record a sign of life."""

    @property
    @abstractmethod
    def silence_s(self) -> float:
        """Seconds since the last heartbeat; 0 before the first."""

    def is_overdue(self, deadline_s: float) -> bool:
        """Whether the last heartbeat is more than `deadline_s` seconds ago."""
        return self.silence_s > deadline_s


class LocalHeartbeat(Heartbeat):
    """A heartbeat recorded by the watching process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def beat(self) -> None:
        self._last = self._clock()

    @property
    def has_beaten(self) -> bool:
        return self._last is not None

    @property
    def silence_s(self) -> float:
        return self._clock() - self._last if self._last is not None else 0.0


class HeartbeatFile(Heartbeat):
    """A heartbeat in a memory-mapped file: one process beats, another one reads it."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_LOADED + 1)
            self._memory = mmap.mmap(file.fileno(), _LOADED + 1)

    def beat(self) -> None:
        _LAST_BEAT.pack_into(self._memory, 0, os.getpid(), time.monotonic_ns())

    @property
    def silence_s(self) -> float:
        last = _LAST_BEAT.unpack_from(self._memory)[1]
        return (time.monotonic_ns() - last) / 1e9 if last else 0.0

    @property
    def pid(self) -> int | None:
        """The ID of the process that beats; None before the first heartbeat."""
        return _LAST_BEAT.unpack_from(self._memory)[0] or None

    @property
    def has_loaded(self) -> bool:
        """Whether the process has finished loading. A process that loads may be silent for longer."""
        return bool(self._memory[_LOADED])

    def mark_loaded(self) -> None:
        self.beat()  # first, because the silence so far was due to loading
        self._memory[_LOADED] = 1

    def keep_beating(self) -> None:
        """Beat now, and from a thread until the process ends or freezes."""
        self.beat()
        threading.Thread(target=self._keep_beating, name="specray-heartbeat", daemon=True).start()

    def _keep_beating(self) -> None:
        while True:
            time.sleep(HEARTBEAT_INTERVAL_S)
            self.beat()


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


async def within(seconds: float, work: Coroutine[Any, Any, T], is_given_up: Callable[[], bool] = lambda: False) -> T:
    """The result of `work`. TimeoutError after `seconds` in which this event loop ran; `work` is then cancelled.

    It times out earlier once `is_given_up()` is true, which is checked every `seconds` / NUM_PARTS.
    """
    task = asyncio.ensure_future(work)
    try:
        waited = 0.0
        for _ in range(NUM_PARTS):
            if (await asyncio.wait([task], timeout=seconds / NUM_PARTS))[0]:
                return task.result()
            waited += seconds / NUM_PARTS
            if is_given_up():
                break
        raise TimeoutError(f"no answer within {waited:g} s")
    finally:
        task.cancel()
