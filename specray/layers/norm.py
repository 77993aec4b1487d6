"""Root-mean-square norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer


class RMSNorm(Layer):
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._doubled = torch.cat((weight, weight)) if weight.device.type == "cpu" else None

    def forward(self, x: Tensor) -> Tensor:
        if self._doubled is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # torch has no fused RMS norm for CPUs; this takes 5 us instead of 10. [x, -x] has mean 0 and variance
        # mean(x^2), so the fused layer norm computes the same.
        doubled = torch.layer_norm(torch.cat((x, -x), -1), self._doubled.shape, self._doubled, None, self.eps)
        return doubled.narrow(-1, 0, x.shape[-1])
