"""The target's choice of a token: processed logits, plus the request's own noise, arg-max.

Greedy is the same rule without noise. Order: logit bias, penalties, held-back end tokens, temperature,
top-k, top-p, min-p (SGLang's), noise. The filters keep whole ties: they are thresholds on the logit, so
the result is a function of the logits alone and not of a sort. Not here: the walk down a draft tree
(`specray.spec_decode.verifier`), which calls `sample` once per depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specray.ops.noise import gumbel
from specray.outputs import TokenLogprob
from specray.step import SamplingOptions

GREEDY_BELOW = 1e-5  # temperatures under it divide logits beyond float32
_PREFIX = 1024  # most likely tokens looked at before the whole vocabulary is


@dataclass(slots=True, eq=False)
class SamplerRow:
    """One request's sampling options and the token counts its penalties need."""

    options: SamplingOptions
    num_output_tokens: int = 0
    output_counts: Tensor | None = None  # [V] float32, generated tokens; only with penalties
    is_known: Tensor | None = None  # [V] bool, prompt and generated tokens; only with repetition penalty
    _held_back: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        options: SamplingOptions,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> "SamplerRow":
        """State after `token_ids`, of which the first `num_prompt_tokens` are the prompt."""
        row = cls(options, len(token_ids) - num_prompt_tokens)
        generated = torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64, device=device)
        if options.presence_penalty or options.frequency_penalty:
            row.output_counts = torch.bincount(generated, minlength=vocab_size).float()
        if options.repetition_penalty != 1.0:
            row.is_known = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            row.is_known[torch.tensor(token_ids, dtype=torch.int64, device=device)] = True
        return row

    @property
    def adjusts(self) -> bool:
        """Whether this row's logits are changed before temperature."""
        counted = self.output_counts is not None or self.is_known is not None
        return counted or bool(self.options.logit_bias) or self.holds_back

    @property
    def holds_back(self) -> bool:
        return self.num_output_tokens < self.options.min_tokens and bool(self.options.eos_token_ids)

    def emitted(self, token_id: int) -> None:
        """Count a token the row has just emitted."""
        self.num_output_tokens += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.is_known is not None:
            self.is_known[token_id] = True


def sample(logits: Tensor, rows: Sequence[SamplerRow], positions: Sequence[int]) -> Tensor:
    """Next token of each row, int64 [rows].

    `logits` is float32 [rows, V] and not changed; `positions[i]` is the absolute position of the token
    being sampled for row i.
    """
    logits, noisy = _adjusted(logits, rows), _noisy(rows)
    if not noisy:
        return logits.argmax(-1)
    options = [rows[i].options for i in noisy]
    scores = _scores(logits[noisy], options)
    scores += gumbel([o.seed for o in options], [positions[i] for i in noisy], logits.shape[-1], logits.device)
    if len(noisy) == len(rows):
        return scores.argmax(-1)
    tokens = logits.argmax(-1)
    tokens[noisy] = scores.argmax(-1)
    return tokens


def target_probs(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """float32 [rows, V]: the law that `sample` draws from; all on one token for rows that are greedy or broken."""
    logits, noisy = _adjusted(logits, rows), _noisy(rows)
    probs = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if noisy:
        drawn = _scores(logits[noisy], [rows[i].options for i in noisy]).softmax(-1)
        probs[noisy] = torch.where(drawn.isfinite().all(-1, keepdim=True), drawn, probs[noisy])
    return probs


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of a token under unprocessed `logits` [V], with the `num_top` most likely beside it."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]))
    return TokenLogprob(token_id, float(logprobs[token_id]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def _noisy(rows: Sequence[SamplerRow]) -> list[int]:
    return [i for i, row in enumerate(rows) if row.options.temperature >= GREEDY_BELOW]


def _adjusted(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Logits [rows, V] before temperature; the same tensor if no row changes any."""
    if not any(row.adjusts for row in rows):
        return logits
    return torch.stack([_adjust(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)])


def _adjust(logits: Tensor, row: SamplerRow) -> Tensor:
    """Bias, penalties and held-back end tokens on one row's logits [V]."""
    logits, options = logits.clone(), row.options
    for token_id, bias in options.logit_bias:
        logits[token_id] += bias
    if row.is_known is not None:
        penalty = options.repetition_penalty
        logits = torch.where(row.is_known, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if row.output_counts is not None:
        logits -= options.frequency_penalty * row.output_counts
        logits -= options.presence_penalty * (row.output_counts > 0)
    if row.holds_back:
        logits[options.eos_token_ids] = -torch.inf
    return logits


def _scores(logits: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """Logits of the law to draw from, of rows that are not greedy, [rows, V] from adjusted ones."""
    return _filter(logits / _column([o.temperature for o in options], logits), options)


def _filter(scaled: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """Top-k, top-p and min-p of logits already divided by temperature, float32 [rows, V], in place."""
    for row_scaled, row in zip(scaled, options, strict=True):
        threshold = row_scaled.max() + torch.tensor(row.min_p).log() if row.min_p > 0 else None
        if row.top_k > 0 or row.top_p < 1.0:
            lowest = _lowest_kept(row_scaled, row.top_k, row.top_p)
            threshold = lowest if threshold is None else torch.maximum(lowest, threshold)
        if threshold is not None:
            row_scaled.masked_fill_(row_scaled < threshold, -torch.inf)
    return scaled


def _lowest_kept(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Smallest logit that top-k, then top-p over what top-k kept, let through."""
    vocab_size = scaled.shape[-1]
    prefix = min(vocab_size, top_k or _PREFIX)
    if top_p == 1.0:
        return scaled.topk(prefix).values[-1]  # a sum in float32 may reach 1 before its last token
    while True:
        best = scaled.topk(prefix).values
        total = best.logsumexp(-1) if top_k else scaled.logsumexp(-1)
        mass = (best - total).exp().cumsum(-1)
        if top_k or mass[-1] >= top_p or prefix == vocab_size:
            kept = int((mass[:-1] < top_p).sum())  # a token stays while the mass before it is below top_p
            return best[kept]
        prefix = vocab_size


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
