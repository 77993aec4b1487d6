"""Kills processes on this machine, including frozen ones.

Ray stops an actor by sending it a message, which a frozen process does not receive.
"""

import contextlib
import os
import select
import signal

RAY_EXIT_S = 1.0  # for a process that Ray ends, which takes milliseconds; Ray logs a failure if it is killed meanwhile


class Process:
    """Another process on this machine, held by a file descriptor so that a process that reuses its ID is not killed."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self, grace_s: float = 0.0) -> None:
        """Kill the process unless it ends within `grace_s` seconds. Idempotent."""
        if self._fd is None:
            return
        ended = select.poll()
        ended.register(self._fd, select.POLLIN)
        ended.poll(1000 * grace_s)
        with contextlib.suppress(OSError):  # already ended
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)
        self._fd = None
