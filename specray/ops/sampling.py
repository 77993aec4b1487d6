"""Sampling: the argmax of processed logits plus the request's own Gumbel noise; greedy decoding adds no noise.

The order is logit bias, penalties, masked tokens, temperature, top-k, top-p and min-p as in SGLang, then noise.
Filters are thresholds on the logit and keep all tied tokens, so the result does not depend on the order of a sort. A
row's result does not depend on the other rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.cpu import sampling as cpu_sampling
from specray.ops.cpu.library import kernels_on
from specray.ops.gpu import uses_triton
from specray.ops.largest_logits import argmax
from specray.ops.noise import gumbel
from specray.ops.sampling_state import GREEDY_BELOW, SamplingBatch, SamplingState
from specray.outputs import TokenLogprob
from specray.step import SamplingOptions

_PREFIX = 1024  # top tokens that top-p looks at on a CPU before it sorts the whole vocabulary


def sample(logits: Tensor, batch: SamplingBatch, keys: Tensor) -> Tensor:
    """The next token of each row, int64 [n].

    `logits` float32 [n, V] are not changed. `keys` [n, 2] are the rows' `noise_keys` for the positions of the tokens.
    """
    logits, sampled = _adjusted(logits, batch.states), _sampled_rows(batch)
    if uses_triton(logits.device):
        from specray.ops.gpu import sampling as gpu_sampling

        return gpu_sampling.sample(logits, batch if sampled else None, keys)
    if not sampled:
        return argmax(logits)
    if (own := kernels_on(logits.device)) is not None:
        return cpu_sampling.sample(own, logits, batch, keys)
    if len(sampled) == len(batch.states):
        return argmax(scores(logits, batch) + gumbel(keys, logits.shape[-1]))
    index = torch.tensor(sampled).to(logits.device)
    drawn = scores(logits[index], batch.select(sampled)) + gumbel(keys[index], logits.shape[-1])
    return argmax(logits).index_copy(0, index, argmax(drawn))


def sample_padded(logits: Tensor, batch: SamplingBatch, keys: Tensor, is_filtered: bool = True) -> Tensor:
    """Sample rows whose options the host does not read. None has bias, penalties or masked end tokens.

    Unless `is_filtered`, no row has top-k, top-p or min-p.
    """
    is_sampled = batch.temperature >= GREEDY_BELOW
    scaled = logits / batch.temperature.where(is_sampled, 1.0)[:, None]
    if is_filtered:
        scaled = scaled.masked_fill(scaled < _lowest_kept(scaled, batch, logits.shape[-1]), -torch.inf)
    return torch.where(is_sampled, argmax(scaled + gumbel(keys, logits.shape[-1])), argmax(logits))


def target_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 [n, V]: the distribution that `sample` draws from; one-hot for rows that are greedy or not finite."""
    logits, sampled = _adjusted(logits, batch.states), _sampled_rows(batch)
    probs = torch.zeros_like(logits).scatter_(1, argmax(logits)[:, None], 1.0)
    if sampled:
        drawn = scores(logits[sampled], batch.select(sampled)).softmax(-1)
        probs[sampled] = torch.where(drawn.isfinite().all(-1, keepdim=True), drawn, probs[sampled])
    return probs


def scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits [n, V] of the distribution to draw from: temperature and filters applied, for rows that are sampled."""
    scaled = logits / batch.temperature[:, None]
    if any(state.is_filtered for state in batch.states):
        scaled.masked_fill_(scaled < _lowest_kept(scaled, batch, _prefix(scaled, batch)), -torch.inf)
    return scaled


def token_logprob(logits: Tensor, token_id: int, options: SamplingOptions) -> TokenLogprob:
    """Log-probability of a token under unprocessed `logits` [V], and of the others that `options` ask for."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(options.logprobs or 0, logits.shape[-1]))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    chosen = options.logprob_token_ids or []
    pairs = zip(chosen, logprobs[chosen].tolist() if chosen else [], strict=True)
    return TokenLogprob(token_id, float(logprobs[token_id]), top, tuple(pairs))


def _sampled_rows(batch: SamplingBatch) -> list[int]:
    return [row for row, state in enumerate(batch.states) if state.is_sampled]


def _adjusted(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Logits [n, V] before temperature; the same tensor if no row changes any."""
    if not any(state.adjusts_logits for state in states):
        return logits
    return torch.stack([_adjust(row_logits, state) for row_logits, state in zip(logits, states, strict=True)])


def _adjust(logits: Tensor, state: SamplingState) -> Tensor:
    """Bias, penalties and masked tokens on one row's logits [V]."""
    logits, options = logits.clone(), state.options
    for token_id, bias in options.logit_bias:
        logits[token_id] += bias
    if state.is_known is not None:
        penalty = options.repetition_penalty
        logits = torch.where(state.is_known, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if state.output_counts is not None:
        logits -= options.frequency_penalty * state.output_counts
        logits -= options.presence_penalty * (state.output_counts > 0)
    if state.masks_end_tokens:
        logits[options.eos_token_ids] = -torch.inf
    if banned := state.banned_tokens():
        logits[banned] = -torch.inf
    if state.is_allowed is not None:
        logits.masked_fill_(~state.is_allowed, -torch.inf)
    return logits


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
