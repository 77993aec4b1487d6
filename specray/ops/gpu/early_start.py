"""Kernels that start while the kernel before them ends, on GPUs from Hopper on (programmatic dependent launch).

Such a kernel waits before it reads or writes what others write, so that all is as if they ran one after the other.
Until then it can bring constants near, such as a part of a weight matrix.
"""

from functools import lru_cache
from typing import Any

import torch

_HOPPER = 9  # compute capability


@lru_cache
def starts_early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device`: the constant EARLY of the kernel, and that it may start early."""
    is_early = device.type == "cuda" and torch.cuda.get_device_properties(device).major >= _HOPPER
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}
