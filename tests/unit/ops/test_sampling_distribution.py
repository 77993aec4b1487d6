"""Samples follow the processed distribution; incorrect samplers fail the same test."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specray.ops import filters
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.step import SamplingOptions
from tests.support.distributions import MAX_Z, OPTIONS, processed_probs, worst_z
from tests.support.sampling import CPU, noise_of, sample_rows, state_of

VOCAB_SIZE = 64
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
PEAKED = LOGITS.index_add(0, torch.tensor([7]), torch.tensor([7.7]))  # token 7 has a probability of about one half
KNOWN = [int(LOGITS.argmax()), 5, 5, 9, 11, 9, 9, 20]  # two prompt tokens and six generated ones
NUM_PROMPT = 2

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "low-temperature": {"temperature": 0.7},
    "high-temperature": {"temperature": 2.5},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "top-k-and-top-p": {"top_k": 20, "top_p": 0.7, "temperature": 0.9},
    "all-filters": {"top_k": 30, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "negative-penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.6},
    "bias": {"logit_bias": [(7, 3.0), (0, -2.0), (9, 1.0)]},
    "min-tokens": {"min_tokens": 10, "eos_token_ids": [1, 9]},
    "min-tokens-reached": {"min_tokens": 6, "eos_token_ids": [1, 9]},
    "everything": {
        "temperature": 0.8,
        "top_k": 25,
        "top_p": 0.93,
        "min_p": 0.02,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": [(7, 2.0)],
        "min_tokens": 10,
        "eos_token_ids": [1],
    },
}

Sampler = Callable[[Tensor, Sequence[SamplingState], Sequence[int]], Tensor]


def worst_z_of(sampler: Sampler, options: dict[str, Any], num_draws: int, logits: Tensor = LOGITS) -> float:
    """The largest z-score of token counts of `num_draws` samples, at four positions for each seed."""
    row_options, counts, size = OPTIONS._replace(**options), np.zeros(VOCAB_SIZE), 20_000
    start = state_of(row_options, KNOWN, NUM_PROMPT, VOCAB_SIZE)
    for first in range(0, num_draws, size):
        seeded = [with_seed(start, seed) for seed in range(first // 4, (first + size) // 4)]
        rows = [row for row in seeded for _ in range(4)]
        tokens = sampler(logits.expand(size, -1), rows, [100, 101, 102, 103] * (size // 4))
        counts += np.bincount(tokens.numpy(), minlength=VOCAB_SIZE)
    return worst_z(counts, processed_probs(logits.numpy(), row_options, KNOWN, NUM_PROMPT))


def with_seed(row: SamplingState, seed: int) -> SamplingState:
    return SamplingState(row.options._replace(seed=seed), row.num_output_tokens, row.output_counts, row.is_known)


@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_processed_distribution(case: str) -> None:
    assert worst_z_of(sample_rows, CASES[case], 100_000 if case == "plain" else 20_000) < MAX_Z


def noise_shared_by_positions(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return sample_rows(logits, rows, [0] * len(positions))


def noise_shared_by_seeds(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return sample_rows(logits, [with_seed(row, row.options.seed // 4) for row in rows], positions)


def noise_for_half_the_tokens(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    noise = noise_of_rows(rows, positions)
    noise[:, ::2] = 0.5772  # the mean
    return (logits + noise).argmax(-1)


def uniform_noise(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return (logits + (-(-noise_of_rows(rows, positions)).exp()).exp()).argmax(-1)


def noise_with_swapped_sign(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return (logits - noise_of_rows(rows, positions)).argmax(-1)


def temperature_after_noise(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return ((logits + noise_of_rows(rows, positions)) / rows[0].options.temperature).argmax(-1)


def one_token_in_fifty_replaced(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    tokens = sample_rows(logits, rows, positions)
    tokens[::50] = 7
    return tokens


def five_percent_more_of_one_token(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    bias = torch.zeros(VOCAB_SIZE)
    bias[7] = np.log(1.05)
    return sample_rows(logits + bias, rows, positions)


def noise_of_rows(rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    return noise_of([row.options.seed for row in rows], positions, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("mutant", "options", "num_draws"),
    [
        (noise_shared_by_positions, {}, 20_000),
        (noise_shared_by_seeds, {}, 20_000),
        (noise_for_half_the_tokens, {}, 20_000),
        (uniform_noise, {}, 20_000),
        (noise_with_swapped_sign, {}, 20_000),
        (temperature_after_noise, {"temperature": 0.7}, 20_000),
        (one_token_in_fifty_replaced, {}, 20_000),
        (five_percent_more_of_one_token, {}, 100_000),
    ],
)
def test_an_incorrect_sampler_is_detected(mutant: Sampler, options: dict[str, Any], num_draws: int) -> None:
    assert (
        worst_z_of(mutant, options, num_draws, PEAKED if mutant is five_percent_more_of_one_token else LOGITS) > MAX_Z
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_nucleus_off_by_one_token_is_detected(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest_kept = filters._lowest_kept

    def shifted(scaled: Tensor, batch: SamplingBatch, prefix: int) -> Tensor:
        ranked = scaled.sort(descending=True).values
        num_kept = (ranked >= lowest_kept(scaled, batch, prefix)).sum(-1, keepdim=True)
        return ranked.gather(1, num_kept - 1 + shift)

    monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    monkeypatch.setattr(filters, "_lowest_kept", shifted)
    assert worst_z_of(sample_rows, CASES["top-p"], 20_000) > MAX_Z


@pytest.mark.parametrize("case", ["presence", "frequency", "repetition", "bias", "min-tokens"])
def test_ignored_options_are_detected(case: str) -> None:
    def mutant(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
        return sample_rows(logits, [SamplingState(OPTIONS._replace(seed=row.options.seed)) for row in rows], positions)

    assert worst_z_of(mutant, CASES[case], 20_000) > MAX_Z


def test_penalties_that_count_the_prompt_are_detected() -> None:
    def mutant(logits: Tensor, rows: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
        whole = state_of(rows[0].options, KNOWN, 0, VOCAB_SIZE)
        return sample_rows(logits, [with_seed(whole, row.options.seed) for row in rows], positions)

    assert worst_z_of(mutant, CASES["presence"], 20_000) > MAX_Z


def test_a_rows_sample_does_not_depend_on_the_batch() -> None:
    rows = [
        state_of(OPTIONS._replace(seed=i, **case), KNOWN, NUM_PROMPT, VOCAB_SIZE)
        for i, case in enumerate([*CASES.values(), {"temperature": 0.0}])
    ]
    positions = list(range(50, 50 + len(rows)))
    together = sample_rows(LOGITS.expand(len(rows), -1), rows, positions)
    alone = [sample_rows(LOGITS[None], [row], [position]) for row, position in zip(rows, positions, strict=True)]
    assert together.tolist() == [int(token) for token in alone]


BEST = int(LOGITS.argmax())


@pytest.mark.parametrize(
    ("banned", "is_sampled"),
    [
        ([[BEST]], False),
        ([[20, BEST]], False),  # the last generated token is 20
        ([[7], [9, 20, BEST]], False),
        ([[9, BEST], [20, 20, BEST], [20]], True),
        ([[5, 5, 9, 11, 9, 9, 20, BEST]], True),  # the prompt's tokens do not count
    ],
)
def test_the_last_token_of_a_banned_sequence_is_not_sampled_after_the_others(
    banned: list[list[int]], is_sampled: bool
) -> None:
    options = OPTIONS._replace(temperature=0.0, banned_sequences=banned)
    started = state_of(options, KNOWN, NUM_PROMPT, VOCAB_SIZE)
    appended = state_of(options, KNOWN[:NUM_PROMPT], NUM_PROMPT, VOCAB_SIZE)
    for token in KNOWN[NUM_PROMPT:]:
        appended.append(token)
    for state in (started, appended):
        [token] = sample_rows(LOGITS[None], [state], [9]).tolist()
        assert (token == BEST) == is_sampled


def test_sampling_does_not_modify_logits() -> None:
    logits = LOGITS.repeat(len(CASES), 1)
    rows = [state_of(OPTIONS._replace(**case), KNOWN, NUM_PROMPT, VOCAB_SIZE) for case in CASES.values()]
    sample_rows(logits, rows, [9] * len(rows))
    assert torch.equal(logits, LOGITS.repeat(len(CASES), 1))


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.sampled_from([0, 1, 40, 1_500, 9_999]),
    st.sampled_from([0.05, 0.5, 0.97, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
@settings(max_examples=60)
@example(seed=0, spread=4.0, top_k=9_999, top_p=1.0, min_p=0.0)  # here a float32 sum reaches 1 before the last token
@example(seed=1292, spread=4.0, top_k=0, top_p=1.0, min_p=0.0)  # here a float64 sum does
@example(seed=4925, spread=1.0, top_k=1_500, top_p=0.9999, min_p=0.0)  # two logits with one log-probability at the edge
def test_filters_keep_the_right_tokens_of_a_large_vocabulary(
    seed: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Also if the nucleus is larger than the part that is sorted first. Tokens within 1e-5 of an edge may be either."""
    logits = np.random.default_rng(seed).normal(size=3_000).astype(np.float32) * spread

    def allowed(edge: float) -> np.ndarray:
        looser_p = top_p if top_p == 1.0 else min(1.0, top_p + edge)
        looser = OPTIONS._replace(top_k=top_k, top_p=looser_p, min_p=min(1.0, min_p * (1 - edge)))
        return processed_probs(logits, looser) > 0

    options = OPTIONS._replace(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_by(options, torch.from_numpy(logits)[None]).numpy()
    assert kept[allowed(-1e-5)].all()
    assert not kept[~allowed(1e-5)].any()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    options = CASES["all-filters"] | {"temperature": temperature}
    rows = [SamplingState(OPTIONS._replace(seed=seed, **options)) for seed in range(20)]
    assert sample_rows(LOGITS.expand(20, -1), rows, [3] * 20).tolist() == [int(LOGITS.argmax())] * 20


def test_a_non_finite_row_does_not_change_others() -> None:
    rows = [SamplingState(OPTIONS._replace(seed=s, **case)) for s, case in enumerate(list(CASES.values())[:8])]
    logits, positions = LOGITS.repeat(8, 1), list(range(8))
    expected = sample_rows(logits, rows, positions)
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[4] = value
        tokens = sample_rows(logits, rows, positions)
        assert torch.equal(tokens[torch.arange(8) != 4], expected[torch.arange(8) != 4])
        assert 0 <= int(tokens[4]) < VOCAB_SIZE


def test_tied_logits_are_all_kept_and_sampled() -> None:
    """Filters are thresholds, so equal logits are kept or dropped together, in whatever order they are sorted."""
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    rows = [SamplingState(OPTIONS._replace(seed=seed, top_k=1)) for seed in range(200)]
    assert set(sample_rows(logits.expand(200, -1), rows, [5] * 200).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.99}, {"top_k": 3, "top_p": 0.5}])
def test_ties_at_the_edge_of_a_filter_are_kept(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1.0, -3.0, 1.0, 1.0]])
    kept = kept_by(OPTIONS._replace(**options), logits)
    assert kept.tolist() == [False, True, False, True, True]


def kept_by(options: SamplingOptions, logits: Tensor) -> Tensor:
    """bool [V]: the tokens that the filters keep, for the logits [1, V] of one row."""
    return filters.scores(logits, SamplingBatch.of([SamplingState(options)], CPU))[0].isfinite()
