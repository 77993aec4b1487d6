"""Simulated acceptance: drafts are accepted at random and at configured rates, regardless of their content.

It measures the cost of steps of a given accept length, with random weights or before a drafter is trained. The text is
meaningless, and every reply, log line and metric of such an engine reports that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from specray.ops.noise import salted, uniform
from specray.ops.sampling import sample
from specray.spec_decode.node_sampler import NodeBatch


def rates_of(accept_length: float) -> list[float]:
    """Acceptance rates by depth for steps of this mean length, bonus token included, each within a token of it."""
    whole = floor(accept_length - 1)
    return [1.0] * whole + [accept_length - 1 - whole]


@dataclass(frozen=True, slots=True)
class SimulatedAcceptance:
    """NodeSampler that takes the best child of a node at depth d with probability `rates[d]`, 0 past their end."""

    rates: Sequence[float]

    def __call__(self, nodes: NodeBatch) -> Tensor:
        rate = self.rates[nodes.depth] if nodes.depth < len(self.rates) else 0.0
        tokens = sample(
            nodes.logits, nodes.sampling, nodes.keys
        )  # so that a step costs what it costs without simulation
        siblings = nodes.siblings
        depth = torch.full_like(nodes.positions, nodes.depth)
        is_accepted = uniform(salted(nodes.sampling.seeds), nodes.positions, depth) < rate
        for _ in range(siblings.shape[1]):  # the first token, from the sampled one on, that is not a child
            is_child = (siblings == tokens[:, None]).any(-1)
            tokens = torch.where(is_child, (tokens + 1) % nodes.logits.shape[-1], tokens)
        best = siblings[:, 0]
        return torch.where(is_accepted & (best >= 0), best, tokens)
