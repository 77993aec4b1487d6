"""Root-mean-square norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.layers.parallel import RankGroup
from specray.ops.device_ops import ops_on


class RMSNorm(Layer):
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, group: RankGroup | None = None) -> None:
        """`group`: the ranks whose parts `after_add` sums."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._group = group or RankGroup()
        self._ops = ops_on(weight.device)
        self.packed = self._ops.pack_norm(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.packed, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of the sum, the sum), of residual and every rank's x; the sum is written to x."""
        one_shot = self._group.one_shot
        if one_shot is not None and one_shot.takes(x):
            return one_shot.add_rms_norm(x, residual, self.packed, self.eps), x
        return self._ops.add_rms_norm(self._group.sum(x), residual, self.packed, self.eps)


class NormOfParts:
    """The norm of x [..., n * size]: each of its n parts with one of the `weights` [size]."""

    def __init__(self, weights: Sequence[Tensor], eps: float) -> None:
        self.weight = torch.stack(tuple(weights))  # [n, size]
        self._ops, self._eps = ops_on(self.weight.device), eps
        self._packed = torch.stack([self._ops.pack_norm(weight) for weight in weights])

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm_parts(x, self._packed, self._eps)
