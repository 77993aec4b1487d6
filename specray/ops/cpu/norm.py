"""The RMS norm of the fused layers as a function of its own."""

import torch
from torch import Tensor

from specray.ops.cpu.library import kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] -> x * weight / sqrt(mean(x^2) + eps), of x's type; `weight` is float32. Needs the kernels."""
    own = kernels()
    assert own is not None
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    own.norm(pointer(x), pointer(weight), x.numel() // size, size, eps, pointer(y), FLOAT_TYPES[x.dtype])
    return y
