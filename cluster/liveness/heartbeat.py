"""Processes of an engine on this machine, whatever state they are in: whether they run, and their certain end.

Ray ends an actor by asking it. A frozen one does not listen; it would keep its memory, its GPU and its sockets.
"""

import contextlib
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

HEARTBEAT_INTERVAL_S = 0.25  # between two signs that a process runs
_BEAT = struct.Struct("=qq")  # a process id; nanoseconds on the machine's monotonic clock, the same in every process
_AT_WORK = _BEAT.size  # where the byte lies that is 0 while the process loads, then 1


class Process:
    """Another process of this machine, held so that its number cannot come to mean a later one."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        """End it, frozen or not. May be called twice."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):  # it has gone by itself
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)
        self._fd = None


class Heartbeat:
    """A clock that one process keeps setting and another one reads, in a file that both have opened."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_AT_WORK + 1)
            self._memory = mmap.mmap(file.fileno(), _AT_WORK + 1)

    def beat(self) -> None:
        _BEAT.pack_into(self._memory, 0, os.getpid(), time.monotonic_ns())

    def begin_work(self) -> None:
        """What has been beating so far was loading; from now on a short silence says something."""
        self.beat()  # first: what was silent until now was loading
        self._memory[_AT_WORK] = 1

    @property
    def pid(self) -> int | None:
        """The process that beats; None before the first beat."""
        return _BEAT.unpack_from(self._memory)[0] or None

    @property
    def is_at_work(self) -> bool:
        """Whether the process that beats has begun its work."""
        return bool(self._memory[_AT_WORK])

    def silence(self) -> float:
        """Seconds since the last beat; 0 before the first."""
        last = _BEAT.unpack_from(self._memory)[1]
        return (time.monotonic_ns() - last) / 1e9 if last else 0.0

    def keep_beating(self) -> None:
        """Beat at once, and in a thread until the process ends or freezes."""
        self.beat()
        threading.Thread(target=self._beat_on, name="specray-pulse", daemon=True).start()

    def _beat_on(self) -> None:
        while True:
            self.beat()
            time.sleep(HEARTBEAT_INTERVAL_S)
