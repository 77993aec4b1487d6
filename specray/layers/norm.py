"""Root-mean-square norm, and the selection of its kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.ops.cpu import norm as cpu_norm
from specray.ops.cpu.library import kernels_on
from specray.ops.cpu.structs import FLOAT_TYPES
from specray.ops.gpu import uses_triton


class RMSNorm(Layer):
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        has_kernel = kernels_on(weight.device) is not None
        self.float_weight = weight.float().contiguous() if has_kernel else None  # as the kernels read it
        self._uses_triton = uses_triton(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.float_weight is not None and x.dtype in FLOAT_TYPES:
            return cpu_norm.rms_norm(x, self.float_weight, self.eps)
        if self._uses_triton and not torch.compiler.is_compiling():  # the compiler fuses the norm with what is around
            from specray.ops.gpu import layers

            return layers.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def of_type(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The norm of inputs of one type, whose kernel is chosen once."""
        if self.float_weight is not None and dtype in FLOAT_TYPES:
            return partial(cpu_norm.rms_norm, weight=self.float_weight, eps=self.eps)
        return self

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, the sum); the sum is written to x."""
        if self._uses_triton and self.float_weight is None and not torch.compiler.is_compiling():
            from specray.ops.gpu import layers

            return layers.add_rms_norm(x, residual, self.weight, self.eps), x
        summed = x.add_(residual)
        return self(summed), summed


def norm_of_parts(weights: Sequence[Tensor], eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The norm of x [..., n * size] of one type: each of its n parts with one of the `weights` [size]."""
    norms = [RMSNorm(weight, eps) for weight in weights]
    floats = [norm.float_weight for norm in norms if norm.float_weight is not None]
    if len(floats) == len(norms) and dtype in FLOAT_TYPES:
        return partial(cpu_norm.rms_norm, weight=torch.stack(floats), eps=eps)

    def normed(x: Tensor) -> Tensor:
        return torch.cat([norm(part) for norm, part in zip(norms, x.chunk(len(norms), -1), strict=True)], -1)

    return normed
