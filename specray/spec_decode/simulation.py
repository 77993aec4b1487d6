"""Simulated acceptance: drafts are accepted by lot, at rates that were asked for, whatever they are.

For measuring what a step of a given accept length costs, with random weights or before a drafter is trained. The text
is nobody's: every reply, log line and metric of such an engine says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from specray.ops.noise import salted, uniform
from specray.ops.sampling import SamplerRow, sample


def rates_of(accept_length: float) -> list[float]:
    """Acceptance by depth that makes steps of so many tokens on average, bonus included, and none a token off that."""
    whole = floor(accept_length - 1)
    return [1.0] * whole + [accept_length - 1 - whole]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A Choose: below a node at depth d, the best child is taken with probability `rates[d]`; past their end, none."""

    rates: Sequence[float]

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[SamplerRow],
        positions: Sequence[int],
        children: Sequence[Mapping[int, int]],
        draft_probs: Tensor | None,  # noqa: ARG002
        depth: int,
    ) -> Tensor:
        rate = self.rates[depth] if depth < len(self.rates) else 0.0
        tokens: list[int] = sample(logits, rows, positions).tolist()  # costs what it always costs
        for i, row in enumerate(rows):
            if children[i] and uniform(salted(row.options.seed), positions[i], depth) < rate:
                tokens[i] = next(iter(children[i]))
            else:
                tokens[i] = next(token for token in _others(tokens[i], logits.shape[-1]) if token not in children[i])
        return torch.tensor(tokens, device=logits.device)


def _others(token: int, vocab_size: int) -> Sequence[int]:
    """The token itself, then those after it."""
    return [(token + step) % vocab_size for step in range(min(vocab_size, 64))]
