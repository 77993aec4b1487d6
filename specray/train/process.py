"""The training process: its memory, and signals that end it."""

import ctypes
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_OFF = -1


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, in huge pages. To be called before torch allocates anything.

    A training step allocates and frees the same large tensors again. By default each goes back to the system, which
    clears its pages the next time: a quarter of the time of a step on two cores. Has no effect with another C library
    than glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _OFF)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Defers Ctrl-C and SIGTERM to the end of a step: the first sets `requested`, a second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
