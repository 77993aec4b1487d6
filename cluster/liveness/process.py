"""Kills processes on this machine, including frozen ones.

Ray stops an actor by sending it a message, which a frozen process does not receive.
"""

import contextlib
import os
import signal


class Process:
    """Another process on this machine, held by a file descriptor so that a process that reuses its ID is not killed."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):  # already ended
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)
        self._fd = None
