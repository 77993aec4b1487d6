"""Rejection sampling: a draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)).

Siblings are tried in order against what is left of the target's law p: after a rejection p becomes max(p - q, 0),
normalised; when all are rejected, and below the last accepted node, the token is drawn from that. So it has the law p
(Leviathan et al., arXiv:2211.17192; several drafts: Miao et al., arXiv:2305.09781), if q is the very law of x. Drafts
that are no draws from a known law (a tree's best tokens, n-grams, what comes from another process) need only be made
without these coins: a q that is all on x is as right for them, and accepts x with probability p(x).

Coins and the last draw are counter noise under keys of their own, by seed and position, never that of the drafters. But
what is accepted depends on what was drafted: one seed has one text for one drafter and schedule of drafts only.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.noise import gumbel, salted, uniform
from specray.ops.sampling import SamplerRow, target_probs


def by_rejection(
    logits: Tensor,
    rows: Sequence[SamplerRow],
    positions: Sequence[int],
    children: Sequence[Mapping[int, int]],
    draft_probs: Tensor | None,
    depth: int,  # noqa: ARG001
) -> Tensor:
    """A Choose."""
    seeds = [row.options.seed for row in rows]
    width = max(map(len, children))
    drafts = [[*tokens, *[-1] * (width - len(tokens))] for tokens in children]
    uniforms = [
        [uniform(seed, at, column) for column in range(width)] for seed, at in zip(seeds, positions, strict=True)
    ]
    device = logits.device
    return choose(
        target_probs(logits, rows),
        torch.tensor(drafts, dtype=torch.int64, device=device).view(len(rows), width),
        draft_probs,
        torch.tensor(uniforms, dtype=torch.float64, device=device).view(len(rows), width),
        gumbel([salted(seed) for seed in seeds], positions, logits.shape[-1], device),
    )


def choose(probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, uniforms: Tensor, noise: Tensor) -> Tensor:
    """Token of each row, int64 [rows]: the accepted draft, or a draw from what the rejected ones leave.

    `probs` [rows, V] is the target's, `drafts` int64 [rows, C] are siblings in order, -1 past a row's own,
    `draft_probs` [rows, up to V] their distributions or zeros, `uniforms` [rows, C] are in (0, 1),
    `noise` [rows, V] is standard Gumbel.
    """
    left, accepted = probs, drafts.new_full((len(drafts), 1), -1)
    for column in range(drafts.shape[1]):
        draft = drafts[:, column : column + 1]
        is_open, token = (accepted < 0) & (draft >= 0), draft.clamp(min=0)
        drawn_from = _probs_of(token, draft_probs, probs.shape[1])
        is_accepted = uniforms[:, column : column + 1] * drawn_from.gather(1, token) < left.gather(1, token)
        accepted = torch.where(is_open & is_accepted, draft, accepted)
        left = torch.where(is_open & ~is_accepted, _without(left, drawn_from), left)
    return torch.where(accepted >= 0, accepted, (left.log() + noise).argmax(-1, keepdim=True))[:, 0]


def _probs_of(token: Tensor, draft_probs: Tensor | None, vocab_size: int) -> Tensor:
    """[rows, V]: `draft_probs`, all on `token` [rows, 1] where these are zeros."""
    certain = torch.zeros(len(token), vocab_size, device=token.device).scatter_(1, token, 1.0)
    if draft_probs is None:
        return certain
    known = F.pad(draft_probs, (0, vocab_size - draft_probs.shape[1]))
    return torch.where(known.sum(-1, keepdim=True) > 0, known, certain)


def _without(probs: Tensor, drawn_from: Tensor) -> Tensor:
    """max(law - drawn_from, 0), normalised; where rounding leaves nothing, the two are equal and `probs` serves."""
    rest = (probs - drawn_from).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, probs)
