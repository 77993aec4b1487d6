"""Root-mean-square norm."""

import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.ops.cpu.library import FLOAT_TYPES, kernels
from specray.ops.cpu.norm import rms_norm


class RMSNorm(Layer):
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        has_kernel = weight.device.type == "cpu" and kernels() is not None
        self.float_weight = weight.float().contiguous() if has_kernel else None  # as the kernels read it

    def forward(self, x: Tensor) -> Tensor:
        if self.float_weight is not None and x.dtype in FLOAT_TYPES:
            return rms_norm(x, self.float_weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
