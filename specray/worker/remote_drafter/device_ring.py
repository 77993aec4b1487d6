"""The ring of hidden states in the memory of a GPU that a target rank and its drafter share, by CUDA IPC.

The target copies on its stream and records an event; the drafter's stream waits for the event, so neither process waits
for the other on the host. A region is free again when the drafter has replied, and it replies when it has drafted from
it. Trees come back in `device_trees`.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from specray.worker.remote_drafter.ring import NUM_REGIONS

# What `reduce_tensor` returns of the memory behind these arguments of `rebuild_cuda_tensor`: type, size, stride,
# offset, type of the storage, dtype.
_NUM_KNOWN = 6
_PLACE_OF_GRAD = 4  # among the others, after the device, the memory's handle, its size and its offset


class DeviceRing:
    """Regions of [tokens, width]; `events` tell that a region was written. Has the interface of HiddenStateRing."""

    def __init__(self, regions: Tensor, events: list[Any]) -> None:
        self._whole, self._events = regions, events
        self.regions: list[Tensor] = list(regions)

    @classmethod
    def make(cls, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> "DeviceRing":
        """The target's end. The memory is the target's, and lasts as long as this object."""
        with torch.inference_mode(False):
            regions = torch.zeros(NUM_REGIONS, tokens, width, dtype=dtype, device=device)
        return cls(regions, shared_events())

    def export(self) -> bytes:
        """What the other process opens the ring with. RuntimeError if the memory cannot be shared."""
        data: bytes = msgpack.packb((shared(self._whole), [event.ipc_handle() for event in self._events]))
        return data

    @classmethod
    def open(cls, data: bytes, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> "DeviceRing":
        """The drafter's end, on the same GPU."""
        memory, handles = msgpack.unpackb(data)
        regions = opened(memory, (NUM_REGIONS, tokens, width), dtype, device)
        return cls(regions, opened_events(handles, device))

    @property
    def num_tokens(self) -> int:
        return len(self.regions[0])

    def write(self, region: int, states: Tensor) -> None:
        """Copy hidden states [n, width] to the first rows of a region."""
        self.regions[region][: len(states)].copy_(states)
        self._events[region].record()

    def wait(self) -> None:
        """The drafter's stream waits."""

    def read(self, region: int) -> Tensor:
        """A region, [tokens, width], for work on the current stream."""
        self._events[region].wait()
        return self.regions[region]

    def close(self) -> None:
        """Let go of the memory."""
        self.regions, self._whole = [], torch.empty(0)


def shared_events() -> list[Any]:
    """An event for each region, which another process opens by its `ipc_handle`."""
    return [torch.cuda.Event(interprocess=True) for _ in range(NUM_REGIONS)]  # type: ignore[no-untyped-call]


def opened_events(handles: Sequence[bytes], device: torch.device) -> list[Any]:
    """Another process's events."""
    open_event: Any = torch.cuda.Event.from_ipc_handle
    return [open_event(device, handle) for handle in handles]


def shared(memory: Tensor) -> list[Any]:
    """What another process opens a contiguous tensor of this GPU with. RuntimeError if it cannot be shared."""
    _, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
    parts: list[Any] = list(arguments[_NUM_KNOWN + 1 :])  # after the device
    del parts[_PLACE_OF_GRAD - 1]
    return parts


def opened(parts: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The memory of `shared`, on the same GPU."""
    handle, size, offset, *counter_and_event = parts
    strides = torch.empty(shape, device="meta").stride()
    known = (Tensor, shape, strides, 0, torch.UntypedStorage, dtype, device.index or 0, handle, size, offset, False)
    with torch.inference_mode(False):
        memory: Tensor = rebuild_cuda_tensor(*known, *counter_and_event)  # type: ignore[no-untyped-call]
    return memory
