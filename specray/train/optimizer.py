"""The optimizer: AdamW, or Muon for matrices and AdamW for the rest."""

from typing import Any

import torch
from torch import nn

from specray.train.muon import Float32Muon

_ADAMW_ONLY = ("lm_head.weight", "mask_hidden")


class Optimizer:
    """One or two torch optimizers used as one. `dtype` is that of the training's matrix products."""

    def __init__(self, head: nn.Module, name: str, weight_decay: float, dtype: torch.dtype) -> None:
        trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
        # Muon is for matrices between hidden states, so the output matrix uses AdamW, and so does the state of a mask:
        # a matrix of one row would move equally far whatever its gradient is.
        turned = [p for n, p in trained.items() if name == "muon" and p.ndim == 2 and n not in _ADAMW_ONLY]
        others = [p for p in trained.values() if all(p is not other for other in turned)]
        self._parameters = list(trained.values())
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if turned:
            muon = torch.optim.Muon if dtype is torch.bfloat16 else Float32Muon
            self._parts.append(muon(turned, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))

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
