"""Lossy acceptance: drafts that are likely enough stand in for the token the target sampled.

At a node whose sampled token is a child, that child is taken, as ever. Else the siblings are walked in order, best
first. With p a sibling's probability by the target's law (temperature and filters applied), A the sum of p so far and S
of all siblings, one with p > 0 is taken as soon as u < A / accept_threshold_acc or p >= accept_threshold_single, where
u is uniform in [S, 1): the place in [0, 1) of a sampled token that is no child. So some child is taken with probability
min(1, S / accept_threshold_acc), as by SGLang's rule, and always where one has probability accept_threshold_single.
With both thresholds 1.0 no more is taken than by `coupled`, which is what runs then. Greedy requests stay exact: all of
their law is on one token. The coin is keyed by seed and position: the same drafts lead to the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.ops.noise import uniform
from specray.ops.sampling import SamplerRow, sample, target_probs


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A Choose with SGLang's two thresholds, each in (0, 1]."""

    single: float
    acc: float

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[SamplerRow],
        positions: Sequence[int],
        children: Sequence[Mapping[int, int]],
        draft_probs: Tensor | None,  # noqa: ARG002
        depth: int,  # noqa: ARG002
    ) -> Tensor:
        tokens: list[int] = sample(logits, rows, positions).tolist()
        open_rows = [i for i, token in enumerate(tokens) if children[i] and token not in children[i]]
        probs_list = target_probs(logits[open_rows], [rows[i] for i in open_rows]) if open_rows else logits[:0]
        for i, probs in zip(open_rows, probs_list, strict=True):
            siblings = list(children[i])
            place = self.first_likely(probs[siblings].tolist(), uniform(rows[i].options.seed, positions[i], 0))
            tokens[i] = tokens[i] if place is None else siblings[place]
        return torch.tensor(tokens, device=logits.device)

    def first_likely(self, probabilities: Sequence[float], uniform: float) -> int | None:
        """Which of the siblings is taken in place of a token that is none of them; `uniform` is in (0, 1)."""
        total, so_far = sum(probabilities), 0.0
        uniform = total + (1 - total) * uniform
        for place, probability in enumerate(probabilities):
            so_far += probability
            if probability > 0 and (uniform < so_far / self.acc or probability >= self.single):
                return place
        return None
