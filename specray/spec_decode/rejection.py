"""Rejection sampling: a draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)).

Siblings are tried in order against the residual of the target's distribution p: after a rejection p becomes
max(p - q, 0), normalised. If all are rejected, and below the last accepted node, the token is drawn from the residual.
The result has the distribution p if q is the distribution that x was drawn from (Leviathan et al., arXiv:2211.17192;
several drafts: Miao et al., arXiv:2305.09781). Drafts that were not drawn from a known distribution (the top tokens of
a tree, n-grams, drafts from another process) only have to be independent of the uniforms used here. For them q is
one-hot: x is accepted with probability p(x).

The uniforms and the last draw use counter noise under salted seeds, never the drafter's noise. What is accepted depends
on what was drafted, so one seed gives one text only for one drafter and one schedule of drafts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.noise import gumbel, noise_keys, salted, uniform
from specray.ops.sampling import target_probs
from specray.spec_decode.node_sampler import NodeBatch


def sample_by_rejection(nodes: NodeBatch) -> Tensor:
    """A NodeSampler."""
    width = int((nodes.siblings >= 0).sum(-1).max())
    seeds, columns = nodes.sampling.seeds, torch.arange(width, device=nodes.logits.device)
    return accept_or_resample(
        target_probs(nodes.logits, nodes.sampling),
        nodes.siblings[:, :width],
        nodes.draft_probs,
        uniform(seeds[:, None], nodes.positions[:, None], columns),
        gumbel(noise_keys(salted(seeds), nodes.positions), nodes.logits.shape[-1]),
    )


def accept_or_resample(
    probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, uniforms: Tensor, noise: Tensor
) -> Tensor:
    """Token of each row, int64 [n]: the accepted draft, or a draw from the residual.

    `probs` [n, V] is the target's distribution, `drafts` int64 [n, C] are siblings in order, -1 past the last,
    `draft_probs` [n, up to V] are their distributions or zeros, `uniforms` [n, C] are in (0, 1), `noise` [n, V] is
    standard Gumbel.
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
    """[n, V]: `draft_probs`, or one-hot at `token` [n, 1] where these are zeros."""
    one_hot = torch.zeros(len(token), vocab_size, device=token.device).scatter_(1, token, 1.0)
    if draft_probs is None:
        return one_hot
    known = F.pad(draft_probs, (0, vocab_size - draft_probs.shape[1]))
    return torch.where(known.sum(-1, keepdim=True) > 0, known, one_hot)


def _without(probs: Tensor, drawn_from: Tensor) -> Tensor:
    """max(probs - drawn_from, 0), normalised; `probs` itself if the two are equal up to rounding."""
    rest = (probs - drawn_from).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, probs)
