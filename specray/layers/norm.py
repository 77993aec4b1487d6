"""Root-mean-square norm, and the selection of its kernel."""

from collections.abc import Sequence

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

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, the sum); the sum is written to x."""
        if self._uses_triton and self.float_weight is None and not torch.compiler.is_compiling():
            from specray.ops.gpu import layers

            return layers.add_rms_norm(x, residual, self.weight, self.eps), x
        summed = x.add_(residual)
        return self(summed), summed


class NormOfParts:
    """The norm of x [..., n * size]: each of its n parts with one of the `weights` [size]."""

    def __init__(self, weights: Sequence[Tensor], eps: float) -> None:
        self.weight = torch.stack(tuple(weights))  # [n, size]
        self._norms = [RMSNorm(weight, eps) for weight in weights]
        floats = [norm.float_weight for norm in self._norms if norm.float_weight is not None]
        self._float_weights = torch.stack(floats) if floats else None  # as the kernels read them
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self._float_weights is not None and x.dtype in FLOAT_TYPES:
            return cpu_norm.rms_norm(x, self._float_weights, self._eps)
        parts = x.chunk(len(self._norms), -1)
        return torch.cat([norm(part) for norm, part in zip(self._norms, parts, strict=True)], -1)
