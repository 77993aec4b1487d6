"""A copy on its way to the host, while the device goes on with what is launched next."""

import torch
from torch import Tensor


class HostCopy:
    """Of a GPU's tensor, which may be written again once this is made; a CPU's tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # to page-locked memory
        self._is_there: torch.Event | None = None
        if tensor.device.type == "cuda":
            self._is_there = torch.Event(tensor.device)
            self._is_there.record()

    def wait(self) -> Tensor:
        """The copy."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy
