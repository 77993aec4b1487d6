"""Muon in float32.

torch.optim.Muon computes its updates in bfloat16, whatever the gradients are. CPUs without instructions for bfloat16
take eighteen times as long for this as for float32.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, the same options and state, and updates in float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * sqrt(max(parameter.shape)))


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """About U V^T for a matrix U S V^T, by Newton-Schulz iterations of fifth degree (Jordan et al., 2024)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    first, third, fifth = coefficients
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x
