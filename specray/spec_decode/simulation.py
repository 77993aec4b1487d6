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
from specray.spec_decode.draft_tree import NONE, DraftTree
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

    def at_nodes(self, chosen: Tensor, tree: DraftTree, seeds: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
        """See PaddedSampler. A token that is a child by chance becomes one beside all children."""
        nodes = torch.arange(tree.tokens.shape[1], device=chosen.device)
        is_child = (tree.parents[:, None] == nodes[:, None]) & ~tree.repeats_sibling()[:, None]
        depths = tree.ancestors().sum(-1) - 1
        rates = torch.zeros(len(nodes), dtype=torch.float64, device=chosen.device)
        for depth, rate in enumerate(self.rates[: len(nodes)]):
            rates[depth].fill_(rate)
        draws = uniform(salted(seeds)[:, None], lengths[:, None] + depths, depths)
        children = tree.tokens[:, None].expand_as(is_child)
        highest = children.masked_fill(~is_child, NONE).amax(-1)
        lowest = children.masked_fill(~is_child, vocab_size).amin(-1)
        other = torch.where(highest + 1 < vocab_size, highest + 1, lowest - 1)
        is_hit = (is_child & (children == chosen[:, :, None])).any(-1)
        best = tree.tokens.gather(1, is_child.to(torch.int8).argmax(-1))
        is_accepted = (draws < rates[depths]) & is_child.any(-1)
        return torch.where(is_accepted, best, torch.where(is_hit, other, chosen))
