"""Sampling in float64: the processed distribution of the next token, and tests of counts against it."""

import numpy as np

from specray.step import SamplingOptions

MAX_Z = 5.5  # a correct sampler exceeds it once in about ten million cells

OPTIONS = SamplingOptions(
    seed=0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias=[],
    min_tokens=0,
    eos_token_ids=[],
    logprobs=None,
)


def processed_probs(
    logits: np.ndarray, options: SamplingOptions, token_ids: list[int] | None = None, num_prompt_tokens: int = 0
) -> np.ndarray:
    """float64 [V]: probabilities of the token after `token_ids`, as the options define them."""
    scores, known = logits.astype(np.float64).copy(), token_ids or []
    generated = known[num_prompt_tokens:]
    for token, bias in options.logit_bias:
        scores[token] += bias
    for token in set(known):
        penalty = options.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(generated):
        scores[token] -= options.presence_penalty + options.frequency_penalty * generated.count(token)
    if len(generated) < options.min_tokens:
        scores[options.eos_token_ids] = -np.inf
    return _filtered(scores / options.temperature, options)


def _filtered(scores: np.ndarray, options: SamplingOptions) -> np.ndarray:
    probs = _normalised(np.exp(scores - scores.max()))
    order = np.argsort(-probs, kind="stable")
    if options.top_k:
        probs[order[options.top_k :]] = 0
        probs = _normalised(probs)
    before = np.concatenate(([0.0], np.cumsum(probs[order])[:-1]))
    nucleus = order[before < options.top_p] if options.top_p < 1.0 else order  # rounded sums reach 1 early
    kept = np.zeros_like(probs)
    kept[nucleus] = probs[nucleus]
    kept[probs < options.min_p * probs.max()] = 0
    return _normalised(kept)


def _normalised(weights: np.ndarray) -> np.ndarray:
    probs: np.ndarray = weights / weights.sum()
    return probs


def worst_z(counts: np.ndarray, probs: np.ndarray) -> float:
    """The largest deviation of any cell's count and of chi-square, in standard deviations; infinite if impossible."""
    counts, probs, total = counts.ravel(), probs.ravel(), counts.sum()
    if counts[probs == 0].any():
        return float("inf")
    counts, probs = counts[probs > 0], probs[probs > 0]
    if len(probs) == 1:
        return 0.0
    cells = np.abs(counts - total * probs) / np.sqrt(total * probs * (1 - probs))
    common = total * probs > 20  # rarer cells are not normally distributed and tested together
    expected, seen = total * probs[common], counts[common]
    if not common.all():
        expected, seen = np.append(expected, total - expected.sum()), np.append(seen, total - seen.sum())
    freedom = len(expected) - 1
    chi_square = ((seen - expected) ** 2 / expected).sum()
    return float(max(cells[common].max(), (chi_square - freedom) / np.sqrt(2 * freedom)))
