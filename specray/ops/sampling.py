"""Sampling: the argmax of processed logits plus the request's own Gumbel noise; greedy decoding adds no noise.

The order is logit bias, penalties, masked tokens, temperature, top-k, top-p and min-p as in SGLang (`filters`), then
noise. A row's result does not depend on the other rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.device_ops import ops_on
from specray.ops.filters import scores
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.outputs import TokenLogprob
from specray.step import SamplingOptions


def sample(logits: Tensor, batch: SamplingBatch, keys: Tensor) -> Tensor:
    """The next token of each row, int64 [n].

    `logits` float32 [n, V] are not changed. `keys` [n, 2] are the rows' `noise_keys` for the positions of the tokens.
    """
    logits, sampled = _adjusted(logits, batch.states), _sampled_rows(batch)
    return ops_on(logits.device).sample(logits, batch, keys, sampled)


def target_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 [n, V]: the distribution that `sample` draws from; one-hot for rows that are greedy or not finite."""
    logits, sampled = _adjusted(logits, batch.states), _sampled_rows(batch)
    largest = ops_on(logits.device).argmax(logits)
    probs = torch.zeros_like(logits).scatter_(1, largest[:, None], 1.0)
    if sampled:
        drawn = scores(logits[sampled], batch.select(sampled)).softmax(-1)
        probs[sampled] = torch.where(drawn.isfinite().all(-1, keepdim=True), drawn, probs[sampled])
    return probs


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
