"""Memory of a GPU that the ranks of one machine read and write directly: torch's symmetric memory, and its division.

A rank's memory has the flags of each program, one for each rank, then two buffers for each program's rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_PROGRAMS = 64  # of a sum; every GPU that has peers runs as many at once
_UNIT = 4096  # bytes: both parts begin at multiples
# Every rank reads every part, so a large sum takes longer than NCCL's, which passes each part on once: ranks * (ranks -
# 1) parts against about 2 * ranks. Derived from links of 400 GB/s and 7 microseconds saved; not measured.
_MOST_TRAFFIC = 32 << 20


def flag_bytes(num_ranks: int) -> int:
    return -(-NUM_PROGRAMS * num_ranks * 8 // _UNIT) * _UNIT


def most_bytes(num_ranks: int) -> int:
    """Of a tensor that is summed through these buffers."""
    return _MOST_TRAFFIC // (num_ranks * (num_ranks - 1))


def buffer_bytes(num_ranks: int, num_rows: int, row_bytes: int) -> int:
    """Of a rank's memory for sums of up to `num_rows`, or as many as `most_bytes` allows; at least 1 a program."""
    rows = -(-min(num_rows, most_bytes(num_ranks) // row_bytes) // NUM_PROGRAMS) or 1
    region = -(-rows * row_bytes // 16) * 16
    return flag_bytes(num_ranks) + -(-2 * NUM_PROGRAMS * region // _UNIT) * _UNIT


class PeerBuffers:
    """`num_bytes` of zeros on each rank's GPU. Make it in every rank, and once all have theirs, let them `meet`.

    Both raise RuntimeError, ImportError or OSError where the driver, the machine or torch cannot.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # not in every build of torch

        self._own: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._own.zero_()
        torch.cuda.synchronize(device)

    def meet(self, group: dist.ProcessGroup) -> list[int]:
        """Addresses of each rank's memory, as seen from this one. It waits in the group's store for others."""
        from torch.distributed import _symmetric_memory as symmetric

        handle: Any = symmetric.rendezvous(self._own, group)
        self._peers = [handle.get_buffer(rank, self._own.shape, torch.uint8) for rank in range(group.size())]
        return [peer.data_ptr() for peer in self._peers]
