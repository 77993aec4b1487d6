"""How a head's parameters move: AdamW, or Muon for its matrices; and the learning rate over a run."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from specray.train.trainer import TrainSettings


class Optimizer:
    """One or two torch optimizers that step together."""

    def __init__(self, head: nn.Module, name: str, rate: float) -> None:
        trained = dict(head.named_parameters())
        with_muon = {n for n, p in trained.items() if name == "muon" and p.ndim == 2 and n != "lm_head.weight"}
        self._parameters = list(trained.values())
        adamw = [p for n, p in trained.items() if n not in with_muon]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(adamw, rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if with_muon:
            matrices = [trained[n] for n in sorted(with_muon)]
            self._parts.append(
                torch.optim.Muon(matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, rate: float, clip: float) -> None:
        """Move by the gradients there are, and clear them."""
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


def learning_rate(settings: "TrainSettings", tokens: int) -> float:
    """Up over the first share of the run, level, and down to 1 % over the last; of a later --tokens, the later end."""
    warm = settings.warmup * settings.tokens
    left = (settings.tokens - tokens) / max(settings.decay * settings.tokens, 1.0)
    factor = min((tokens + settings.batch_tokens) / warm if warm else 1.0, 1.0, max(left, 0.01))
    return settings.learning_rate * factor
