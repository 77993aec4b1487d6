"""The ring of hidden states in the memory of a GPU that a target rank and its drafter share, by CUDA IPC.

The target copies on its stream and records an event; the drafter's stream waits for the event, so neither process waits
for the other on the host. A region is free again when the drafter has replied, and it replies with trees that were made
from it. Trees do not come back this way: the target's stream would wait for the drafter's, for ever if that hangs,
while the host may stop waiting for a reply.
"""

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
        events = [torch.cuda.Event(interprocess=True) for _ in range(NUM_REGIONS)]  # type: ignore[no-untyped-call]
        return cls(regions, events)

    def export(self) -> bytes:
        """What the other process opens the ring with. RuntimeError if the memory cannot be shared."""
        _, arguments = reduce_tensor(self._whole)  # type: ignore[no-untyped-call]
        _, *memory = arguments[_NUM_KNOWN:]
        del memory[_PLACE_OF_GRAD - 1]
        data: bytes = msgpack.packb((memory, [event.ipc_handle() for event in self._events]))
        return data

    @classmethod
    def open(cls, data: bytes, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> "DeviceRing":
        """The drafter's end, on the same GPU."""
        memory, handles = msgpack.unpackb(data)
        handle, size, offset, *counter_and_event = memory
        shape, index = (NUM_REGIONS, tokens, width), device.index or 0
        strides = (tokens * width, width, 1)
        known = (Tensor, shape, strides, 0, torch.UntypedStorage, dtype, index, handle, size, offset, False)
        with torch.inference_mode(False):
            regions = rebuild_cuda_tensor(*known, *counter_and_event)  # type: ignore[no-untyped-call]
        open_event: Any = torch.cuda.Event.from_ipc_handle
        return cls(regions, [open_event(device, event) for event in handles])

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
