"""Heartbeats: a watcher compares the time since the last heartbeat of a process or connection with a deadline.

`LocalHeartbeat` is for watchers that observe activity themselves, such as received messages or generated tokens.
`HeartbeatFile` is for watching another process on the same machine.
"""

import mmap
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

HEARTBEAT_INTERVAL_S = 0.25  # of processes that beat in a file
_LAST_BEAT = struct.Struct("=qq")  # process ID, and nanoseconds on the monotonic clock, which all processes share
_LOADED = _LAST_BEAT.size  # offset of a byte that is 0 until the process has loaded


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
