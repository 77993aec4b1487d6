"""Copies to the host that do not block the device, and waiting for the work on a device's stream."""

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Wait for the work launched on a GPU's current stream; returns at once on a CPU."""
    if device.type == "cuda":
        end = torch.Event(device)
        end.record()
        end.synchronize()


class HostCopy:
    """Of a GPU's tensor, which may be written again once this is made; a CPU's tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # to page-locked memory
        self._end: torch.Event | None = None
        if tensor.device.type == "cuda":
            self._end = torch.Event(tensor.device)
            self._end.record()

    @property
    def is_there(self) -> bool:
        """Whether `wait` returns at once."""
        return self._end is None or self._end.query()

    def wait(self) -> Tensor:
        """The copy."""
        if self._end is not None:
            self._end.synchronize()
        return self._copy
