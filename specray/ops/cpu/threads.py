"""How many threads the CPU kernels use.

torch's own threads are then switched off: between two operations they spin, on the cores that the kernels need.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_count: int | None = None
_SMALL = 6 << 20  # bytes of weights that one thread has nearly read by the time another has woken up


def use_kernel_threads(count: int) -> None:
    """Compute on `count` threads with the kernels, and on one with torch."""
    global _count  # like torch's, a setting of the process
    _count = count
    torch.set_num_threads(1)


def num_threads(num_bytes: int | None = None) -> int:
    """Threads of a call of the kernels that reads `num_bytes` of weights.

    torch's number if `use_kernel_threads` was never called; one for little work.
    """
    if num_bytes is not None and num_bytes < _SMALL:
        return 1
    return torch.get_num_threads() if _count is None else _count


@contextmanager
def torch_threads() -> Iterator[None]:
    """Give torch the threads of the kernels, for code that runs on torch alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    yield
    torch.set_num_threads(before)
