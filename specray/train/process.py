"""Processes of training: their memory, and what ends them. Quick to import."""

import ctypes
import os
import signal
import threading
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
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


def run_with_parent(module: str, function: str, *arguments: Any) -> None:
    """Call a module's function in a child process, which ends when its parent does, even if that is killed.

    The module is imported here, because a process should watch its parent before it imports torch.
    """
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    getattr(import_module(module), function)(*arguments)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


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
