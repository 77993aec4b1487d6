"""Lossy acceptance: sufficiently likely drafts replace the token that the target sampled.

At a node whose sampled token is a child, that child is taken, as by `coupled`. Otherwise the siblings are walked in
order, best first, and the first one with p > 0 and

    u < A / accept_threshold_acc   or   p >= accept_threshold_single

is taken. Here p is the sibling's probability under the target (temperature and filters applied), A the sum of p so far,
S the sum over all siblings, and u is uniform in [S, 1): the sampled token was none of the siblings. So a child is taken
with probability min(1, S / accept_threshold_acc), as in SGLang, and always if one has probability
accept_threshold_single. With both thresholds 1.0 the result is that of `coupled`, which runs then.
Greedy requests stay exact: their distribution is one-hot. The uniform is keyed by seed and position, so the same drafts
lead to the same text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specray.ops.noise import uniform
from specray.ops.sampling import sample, target_probs
from specray.spec_decode.node_sampler import NodeBatch


@dataclass(frozen=True, slots=True)
class ThresholdSampler:
    """A NodeSampler with SGLang's two thresholds, each in (0, 1]."""

    single: float
    acc: float

    def __call__(self, nodes: NodeBatch) -> Tensor:
        tokens, siblings = sample(nodes.logits, nodes.sampling, nodes.keys), nodes.siblings
        probs = target_probs(nodes.logits, nodes.sampling).gather(1, siblings.clamp(min=0)) * (siblings >= 0)
        uniforms = uniform(nodes.sampling.seeds, nodes.positions, torch.zeros_like(nodes.positions))
        place = self.first_likely(probs, uniforms)[:, None]
        is_child = (siblings == tokens[:, None]).any(-1, keepdim=True)
        other = siblings.gather(1, place.clamp(min=0))
        return torch.where((place >= 0) & ~is_child, other, tokens[:, None])[:, 0]

    def first_likely(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """The sibling that replaces a sampled token that is none of them, int64 [n]; -1 for none.

        `probs` [n, C] are the siblings' probabilities, `uniforms` [n] are in (0, 1).
        """
        probs = probs.double()
        total = probs.sum(-1, keepdim=True)
        threshold = total + (1 - total) * uniforms[:, None]
        is_likely = (probs > 0) & ((threshold < probs.cumsum(-1) / self.acc) | (probs >= self.single))
        place = (
            is_likely.to(torch.int8).argmax(-1) if probs.shape[-1] else torch.zeros_like(uniforms, dtype=torch.int64)
        )
        return torch.where(is_likely.any(-1), place, -1)
