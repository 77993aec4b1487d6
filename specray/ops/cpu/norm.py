"""The RMS norm of the fused layers as a function of its own."""

import torch
from torch import Tensor

from specray.ops.cpu.library import kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] -> x * weight / sqrt(mean(x^2) + eps), of x's type; `weight` is float32. Needs the kernels.

    With weights [n, size], x [..., n * size] consists of n parts, each normed with its own.
    """
    cpu_kernels = kernels()
    assert cpu_kernels is not None
    assert x.shape[-1] == weight.numel(), (x.shape, weight.shape)
    x = x.contiguous()
    y, size = torch.empty_like(x), weight.shape[-1]
    num_weights = weight.numel() // size
    cpu_kernels.norm(
        pointer(x), pointer(weight), num_weights, x.numel() // size, size, eps, pointer(y), FLOAT_TYPES[x.dtype]
    )
    return y
