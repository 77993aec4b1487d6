"""Sampling: the argmax of processed logits plus the request's own Gumbel noise; greedy decoding adds no noise.

The order is logit bias, penalties, masked end tokens, temperature, top-k, top-p and min-p as in SGLang, then noise.
Filters are thresholds on the logit and keep all tied tokens, so the result does not depend on the order of a sort. A
row's result does not depend on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.ops.argmax import argmax
from specray.ops.noise import gumbel
from specray.outputs import TokenLogprob
from specray.step import SamplingOptions

GREEDY_BELOW = 1e-5  # smaller temperatures would overflow float32
_PREFIX = 1024  # top tokens that top-p looks at on a CPU before it sorts the whole vocabulary


@dataclass(slots=True, eq=False)
class SamplingState:
    """One request's sampling options and the token counts that its penalties need."""

    options: SamplingOptions
    num_output_tokens: int = 0
    output_counts: Tensor | None = None  # float32 [V], generated tokens; only with presence or frequency penalty
    is_known: Tensor | None = None  # bool [V], prompt and generated tokens; only with repetition penalty

    @classmethod
    def start(
        cls,
        options: SamplingOptions,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> "SamplingState":
        """The state after `token_ids`, of which the first `num_prompt_tokens` are the prompt."""
        state = cls(options, len(token_ids) - num_prompt_tokens)
        if options.presence_penalty or options.frequency_penalty:
            generated = torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64, device=device)
            state.output_counts = torch.bincount(generated, minlength=vocab_size).float()
        if options.repetition_penalty != 1.0:
            state.is_known = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            state.is_known[torch.tensor(token_ids, dtype=torch.int64, device=device)] = True
        return state

    @property
    def is_sampled(self) -> bool:
        return self.options.temperature >= GREEDY_BELOW

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before temperature: by bias, penalties or end tokens that are not allowed yet."""
        counts = self.output_counts is not None or self.is_known is not None
        return counts or bool(self.options.logit_bias) or self.masks_end_tokens

    @property
    def masks_end_tokens(self) -> bool:
        return self.num_output_tokens < self.options.min_tokens and bool(self.options.eos_token_ids)

    def append(self, token_id: int) -> None:
        """Count a token that was emitted."""
        self.num_output_tokens += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.is_known is not None:
            self.is_known[token_id] = True


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling options of n rows: tensors for the device, states for the host's choice of a code path."""

    states: list[SamplingState]
    seeds: Tensor  # int64 [n]
    temperature: Tensor  # float32 [n]
    top_k: Tensor  # int64 [n], 0: off
    top_p: Tensor  # float32 [n]
    min_p: Tensor  # float32 [n]

    @classmethod
    def of(cls, states: Sequence[SamplingState], device: torch.device) -> "SamplingBatch":
        """Tensors from the states' options."""
        options = [state.options for state in states]
        numbers = torch.tensor([(o.temperature, o.top_p, o.min_p) for o in options], dtype=torch.float32)
        temperature, top_p, min_p = numbers.view(-1, 3).to(device).unbind(1)
        integers = torch.tensor([(o.seed, o.top_k) for o in options], dtype=torch.int64)
        seeds, top_k = integers.view(-1, 2).to(device).unbind(1)
        return cls(list(states), seeds, temperature, top_k, top_p, min_p)

    def select(self, rows: Sequence[int]) -> "SamplingBatch":
        """These rows, in this order; a row may be named more than once."""
        if len(rows) == len(self.states) and all(row == place for place, row in enumerate(rows)):
            return self
        index = torch.tensor(rows, dtype=torch.int64).to(self.seeds.device)
        tensors = (self.seeds, self.temperature, self.top_k, self.top_p, self.min_p)
        return SamplingBatch([self.states[row] for row in rows], *(tensor.index_select(0, index) for tensor in tensors))


def sample(logits: Tensor, batch: SamplingBatch, keys: Tensor) -> Tensor:
    """The next token of each row, int64 [n].

    `logits` float32 [n, V] are not changed. `keys` [n, 2] are the rows' `noise_keys` for the positions of the tokens.
    """
    logits, sampled = _adjusted(logits, batch.states), _sampled_rows(batch)
    if not sampled:
        return argmax(logits)
    if len(sampled) == len(batch.states):
        return argmax(scores(logits, batch) + gumbel(keys, logits.shape[-1]))
    index = torch.tensor(sampled).to(logits.device)
    drawn = scores(logits[index], batch.select(sampled)) + gumbel(keys[index], logits.shape[-1])
    return argmax(logits).index_copy(0, index, argmax(drawn))


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
    options = [state.options for state in batch.states]
    if any(o.top_k > 0 or o.top_p < 1.0 or o.min_p > 0.0 for o in options):
        scaled.masked_fill_(scaled < _lowest_kept(scaled, batch), -torch.inf)
    return scaled


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of a token under unprocessed `logits` [V], and the `num_top` most likely tokens."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]))
    return TokenLogprob(token_id, float(logprobs[token_id]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def _sampled_rows(batch: SamplingBatch) -> list[int]:
    return [row for row, state in enumerate(batch.states) if state.is_sampled]


def _adjusted(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Logits [n, V] before temperature; the same tensor if no row changes any."""
    if not any(state.adjusts_logits for state in states):
        return logits
    return torch.stack([_adjust(row_logits, state) for row_logits, state in zip(logits, states, strict=True)])


def _adjust(logits: Tensor, state: SamplingState) -> Tensor:
    """Bias, penalties and masked end tokens on one row's logits [V]."""
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
    return logits


def _lowest_kept(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """The smallest logit [n, 1] that top-k, then top-p over what top-k kept, and min-p let through."""
    logprobs = scaled.log_softmax(-1)  # row by row, so that no row's bits depend on the others
    vocab_size = scaled.shape[-1]
    # Sorting a prefix is enough for almost every nucleus. On a GPU the host could not check that without a copy.
    longest = max((state.options.top_k for state in batch.states), default=0)
    prefix = min(vocab_size, max(longest, _PREFIX)) if scaled.device.type == "cpu" else vocab_size
    ids, count, is_enough = _nucleus(logprobs, prefix, batch)
    if prefix < vocab_size and not bool(is_enough.all()):
        ids, count, _ = _nucleus(logprobs, vocab_size, batch)
    lowest = scaled.gather(1, ids.gather(1, count[:, None] - 1))
    is_limited = (batch.top_k > 0) | (batch.top_p < 1.0)
    lowest = lowest.masked_fill(~is_limited[:, None], -torch.inf)
    floor = scaled.max(-1, keepdim=True).values + batch.min_p[:, None].log()  # min_p 0: minus infinity
    return torch.maximum(lowest, floor)


def _nucleus(logprobs: Tensor, prefix: int, batch: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(the `prefix` likeliest ids [n, prefix], how many of them top-k and top-p keep, whether these are all)."""
    best, ids = logprobs.topk(prefix)
    limit = torch.where(batch.top_k > 0, batch.top_k, logprobs.shape[-1]).clamp(max=prefix)[:, None]
    places = torch.arange(prefix, device=logprobs.device)
    mass = best.exp().masked_fill_(places >= limit, 0.0).cumsum(-1)
    total = torch.where(batch.top_k[:, None] > 0, mass[:, -1:], torch.ones_like(mass[:, -1:]))
    # A token is kept while the mass before it is below top_p. With top_p = 1 all are kept, even if the sum rounds to 1.
    is_kept = (mass[:, :-1] < batch.top_p[:, None] * total) | (batch.top_p[:, None] >= 1.0)
    count = 1 + (is_kept & (places[1:] < limit)).sum(-1)
    is_enough = (batch.top_k > 0) | (batch.top_p >= 1.0) | (mass[:, -1] >= batch.top_p)
    return ids, count, is_enough
