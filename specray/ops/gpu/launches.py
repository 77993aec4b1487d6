"""Launches of Triton's kernels: the processors that they run on, when they start, and the layout of their matrices."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specray.ops.attention import is_float8

_HOPPER = 9  # compute capability
_FIRST_E4M3 = (8, 9)  # compute capability of the first GPUs that convert it


def num_processors(device: torch.device) -> int:
    """Of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def starts_early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device`: the constant EARLY of the kernel, and that it may start early.

    From Hopper on, such a kernel may start while the kernel before it ends (programmatic dependent launch). It waits
    (`wait_for_kernels_before`) before it reads or writes what others write, so that all is as if they ran one after the
    other. Until then it can bring constants near, such as a part of a weight matrix.
    """
    is_early = device.type == "cuda" and torch.cuda.get_device_properties(device).major >= _HOPPER
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


def of_float8(pool: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that reads or writes a KV pool `as_bytes`: see `shared_kernels.from_float8`."""
    if not is_float8(pool.dtype):
        return {"MANTISSA": 0, "CONVERTS": False}
    return {"MANTISSA": 3 if pool.dtype is torch.float8_e4m3fn else 2, "CONVERTS": _converts_e4m3(pool.device)}


@lru_cache
def _converts_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_E4M3


def by_rows(part: Tensor) -> Tensor:
    """[B, N] with contiguous rows, any row stride."""
    return part if part.stride(1) == 1 or part.shape[1] == 1 else part.contiguous()


def alike(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Both with contiguous rows, as far apart in one as in the other."""
    if tokens.stride() == parents.stride() and tokens.stride(1) == 1:
        return tokens, parents
    return tokens.contiguous(), parents.contiguous()
