"""The optimizer: AdamW, or Muon for matrices and AdamW for the rest."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

# Tables, output matrices, and matrices of one row, of which Muon would move any gradient equally far.
_ADAMW_ONLY = (
    "lm_head.weight",
    "mask_hidden",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
)


class Optimizer:
    """One or two torch optimizers used as one. `dtype` is that of the training's matrix products."""

    def __init__(self, head: nn.Module, name: str, weight_decay: float, dtype: torch.dtype) -> None:
        trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
        # Muon is for matrices between hidden states.
        matrices = [p for n, p in trained.items() if name == "muon" and p.ndim == 2 and n not in _ADAMW_ONLY]
        others = [p for p in trained.values() if all(p is not other for other in matrices)]
        self._parameters = list(trained.values())
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if matrices:
            muon = torch.optim.Muon if dtype is torch.bfloat16 else Float32Muon
            self._parts.append(muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))

    def step(self, rate: float, clip: float) -> None:
        """Update the parameters and clear the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, clip)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, the same options and state, and updates in float32.

    torch.optim.Muon computes its updates in bfloat16, whatever the gradients are. CPUs without instructions for
    bfloat16 take eighteen times as long for this as for float32.
    """

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
