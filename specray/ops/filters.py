"""Temperature and the filters of sampled requests: top-k, top-p and min-p, as thresholds on the logit.

All tied tokens are kept, so the result does not depend on the order of a sort. A row's result does not depend on the
other rows.
"""

import torch
from torch import Tensor

from specray.ops.sampling_state import GREEDY_BELOW, SamplingBatch

_PREFIX = 1024  # top tokens that top-p looks at on a CPU before it sorts the whole vocabulary


def scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits [n, V] of the distribution to draw from: temperature and filters applied, for rows that are sampled."""
    scaled = logits / batch.temperature[:, None]
    if any(state.is_filtered for state in batch.states):
        scaled.masked_fill_(scaled < _lowest_kept(scaled, batch, _prefix(scaled, batch)), -torch.inf)
    return scaled


def padded_scores(logits: Tensor, batch: SamplingBatch, is_filtered: bool = True) -> Tensor:
    """`scores` of rows whose options the host does not read; undefined for greedy ones.

    Unless `is_filtered`, no row has top-k, top-p or min-p.
    """
    scaled = logits / batch.temperature.where(batch.temperature >= GREEDY_BELOW, 1.0)[:, None]
    if not is_filtered:
        return scaled
    return scaled.masked_fill(scaled < _lowest_kept(scaled, batch, logits.shape[-1]), -torch.inf)


def _prefix(scaled: Tensor, batch: SamplingBatch) -> int:
    """How many of the most likely tokens to sort.

    A prefix is enough for almost every nucleus. On a GPU the host could not check that without a copy.
    """
    if scaled.device.type != "cpu":
        return scaled.shape[-1]
    longest = max((state.options.top_k for state in batch.states), default=0)
    return min(scaled.shape[-1], max(longest, _PREFIX))


def _lowest_kept(scaled: Tensor, batch: SamplingBatch, prefix: int) -> Tensor:
    """The smallest logit [n, 1] that passes top-k, top-p over the tokens that top-k kept, and min-p.

    Only the `prefix` most likely tokens are sorted at first.
    """
    logprobs = scaled.log_softmax(-1)  # row by row, so that no row's bits depend on the others
    vocab_size = scaled.shape[-1]
    best, count, is_enough = _nucleus(scaled, logprobs, prefix, batch)
    if prefix < vocab_size and not bool(is_enough.all()):
        best, count, _ = _nucleus(scaled, logprobs, vocab_size, batch)
    lowest = best.gather(1, count[:, None] - 1)
    is_limited = (batch.top_k > 0) | (batch.top_p < 1.0)
    lowest = lowest.masked_fill(~is_limited[:, None], -torch.inf)
    floor = scaled.max(-1, keepdim=True).values + batch.min_p[:, None].log()  # min_p 0: minus infinity
    return torch.maximum(lowest, floor)


def _nucleus(scaled: Tensor, logprobs: Tensor, prefix: int, batch: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(the `prefix` largest logits [n, prefix], how many of them top-k and top-p keep, whether these are all).

    The logits are sorted because two of them can have the same rounded log-probability.
    """
    best, ids = scaled.topk(prefix)
    limit = torch.where(batch.top_k > 0, batch.top_k, logprobs.shape[-1]).clamp(max=prefix)[:, None]
    places = torch.arange(prefix, device=logprobs.device)
    mass = logprobs.gather(1, ids).exp().masked_fill_(places >= limit, 0.0).cumsum(-1)
    total = torch.where(batch.top_k[:, None] > 0, mass[:, -1:], torch.ones_like(mass[:, -1:]))
    # A token is kept while the mass before it is below top_p. With top_p = 1 all are kept, even if the sum rounds to 1.
    is_kept = (mass[:, :-1] < batch.top_p[:, None] * total) | (batch.top_p[:, None] >= 1.0)
    count = 1 + (is_kept & (places[1:] < limit)).sum(-1)
    is_enough = (batch.top_k > 0) | (batch.top_p >= 1.0) | (mass[:, -1] >= batch.top_p)
    return best, count, is_enough
