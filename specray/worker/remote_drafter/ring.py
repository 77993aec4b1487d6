"""Shared memory that passes hidden states from a target rank to its drafter's process without a copy through a socket.

The target writes regions in turn. The drafter reads a region until it has replied to the order that named it. The
memory has no name: its file descriptor is passed over the socket, and it is freed with the last process that maps it.
Where hidden states come from a GPU or go to one, the memory is page-locked, so that the GPU copies without the CPU.
"""

import logging
import math
import mmap
import os
import tempfile

import torch
from torch import Tensor

NUM_REGIONS = 4  # orders in flight: usually one, more while the drafter is late

logger = logging.getLogger(__name__)


class HiddenStateRing:
    """Regions of [tokens, width] over the file `fd`, for tensors on `device`. The caller may close `fd` afterwards."""

    def __init__(self, fd: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        size = ring_bytes(tokens, width, dtype)
        with torch.inference_mode(False):  # made between two forwards, written outside of them
            # The tensor keeps the mapping alive. A drafter that reads no hidden states has none.
            flat = torch.frombuffer(mmap.mmap(fd, size), dtype=dtype) if size else torch.empty(0, dtype=dtype)
            self.regions: list[Tensor] = list(flat.view(NUM_REGIONS, tokens, width))
        self._locked = _lock_pages(flat.data_ptr(), size) if size and device.type == "cuda" else None
        self._written: torch.Event | None = None  # the last region, by a GPU

    @property
    def num_tokens(self) -> int:
        return len(self.regions[0])

    def write(self, region: int, states: Tensor) -> None:
        """Copy hidden states [n, width] to the first rows of a region; `wait` for it before the other process reads."""
        self.regions[region][: len(states)].copy_(states, non_blocking=True)
        if states.device.type == "cuda":
            self._written = torch.Event(states.device)
            self._written.record()

    def wait(self) -> None:
        """Wait for the last `write`."""
        if self._written is not None:
            self._written.synchronize()

    def read(self, region: int) -> Tensor:
        """A region, [tokens, width], in the memory of the host."""
        return self.regions[region]

    def close(self) -> None:
        """Unlock the pages; call it before the memory is unmapped."""
        if self._locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
            self._locked = None


def ring_bytes(tokens: int, width: int, dtype: torch.dtype) -> int:
    """Of a ring with regions of [tokens, width]."""
    return math.prod((NUM_REGIONS, tokens, width, dtype.itemsize))


def open_file(tokens: int, width: int, dtype: torch.dtype) -> int:
    """A new file for a ring; the caller closes it."""
    size = ring_bytes(tokens, width, dtype)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("specray-hidden-states")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _lock_pages(address: int, size: int) -> int | None:
    """The address, once CUDA has locked the memory behind it; None if it could not, and copies go through the CPU."""
    error = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
    if int(error) == 0:
        return address
    logger.warning(
        "%d MiB of shared memory for hidden states could not be page-locked (CUDA error %d), which makes drafts "
        "slower; raise the limit of locked memory (ulimit -l)",
        size >> 20,
        int(error),
    )
    return None
