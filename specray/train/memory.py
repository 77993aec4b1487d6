"""Memory of training processes.

A training step allocates and frees the same large tensors again. By default each goes back to the system, which clears
its pages the next time: a quarter of the time of a step on two cores.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_OFF = -1


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, in huge pages. To be called before torch allocates anything.

    Has no effect with another C library than glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _OFF)
