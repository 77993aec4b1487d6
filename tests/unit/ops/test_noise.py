"""Gumbel noise is a function of (seed, position, token), with the right distribution and no correlations."""

import numpy as np
import pytest
import torch

from tests.support.distributions import MAX_Z
from tests.support.sampling import noise_of

SIZE = 64
GOLDEN_TOKENS = [0, 1, 63, 199_999]
GOLDEN = {
    (0, 0): [0.6841566562652588, -0.13132581114768982, -0.37225839495658875, 1.441508412361145],
    (1, 0): [-1.4512131214141846, 0.18195128440856934, 1.30868399143219, -0.5123820900917053],
    (0, 1): [-0.15577968955039978, -0.979804515838623, -0.05226600542664528, -0.8205766677856445],
    (-(2**63), 7): [0.24587583541870117, 0.940731942653656, -0.24580085277557373, -0.5128880739212036],
    (2**63 - 1, 10_000_000): [-0.8966623544692993, -0.4510951638221741, 1.8755441904067993, 0.048368051648139954],
    (-1, 2**31): [-0.07996097952127457, -0.8231046199798584, -1.951337456703186, 0.9934760928153992],
}


def uniforms(seeds: list[int], positions: list[int], vocab_size: int = SIZE) -> np.ndarray:
    """The noise, transformed to a uniform distribution on (0, 1)."""
    noise = noise_of(seeds, positions, vocab_size).double().numpy()
    return np.exp(-np.exp(-noise))


def correlation_z(left: np.ndarray, right: np.ndarray) -> float:
    """Correlation of two arrays, in standard deviations under independence."""
    return float(abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) * np.sqrt(left.size))


def test_noise_does_not_depend_on_the_batch() -> None:
    batch = noise_of([7, 8, 7], [3, 3, 4], SIZE)
    for row, (seed, position) in enumerate([(7, 3), (8, 3), (7, 4)]):
        assert torch.equal(batch[row], noise_of([seed], [position], SIZE)[0])


def test_noise_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert torch.equal(noise_of([5], [9], SIZE), noise_of([5], [9], 1000)[:, :SIZE])


def test_noise_of_some_token_ids_equals_theirs_in_the_noise_of_all() -> None:
    """A drafter with a reduced vocabulary computes the target's noise for its own tokens only."""
    seeds, positions = [5, -9, 2**40], [9, 0, 3]
    full = noise_of(seeds, positions, 200_000)
    for ids in ([0], [63, 1, 199_999, 7], list(range(50_000, 50_300)), [4, 4]):
        chosen = torch.tensor(ids)
        assert torch.equal(noise_of(seeds, positions, len(ids), chosen), full[:, chosen])
        assert torch.equal(chosen, torch.tensor(ids))  # the argument is not changed


def test_noise_of_a_seed_never_changes() -> None:
    """A stored seed must reproduce its output in later releases, so these values must not change."""
    for (seed, position), expected in GOLDEN.items():
        noise = noise_of([seed], [position], 200_000)[0]
        assert noise[GOLDEN_TOKENS].tolist() == pytest.approx(expected, rel=1e-6)
        assert not torch.equal(noise, noise_of([seed], [position + 1], 200_000)[0])


def test_every_valid_seed_has_different_noise() -> None:
    seeds = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**32, 2**53, 2**63 - 1]
    noise = noise_of(seeds, [4] * len(seeds), SIZE)
    assert len({tuple(row) for row in noise.tolist()}) == len(seeds)


def test_a_seed_and_its_negative_are_uncorrelated() -> None:
    seeds = list(range(1, 20_001))
    assert correlation_z(uniforms(seeds, [3] * 20_000), uniforms([-seed for seed in seeds], [3] * 20_000)) < MAX_Z


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    noise = noise_of(list(range(20_000)), [8] * 20_000, SIZE).double().numpy().ravel()
    mean, variance = 0.5772156649, np.pi**2 / 6
    assert abs(noise.mean() - mean) / np.sqrt(variance / noise.size) < MAX_Z
    assert abs(noise.var() - variance) / (variance * np.sqrt(4.4 / noise.size)) < MAX_Z  # kurtosis of Gumbel: 5.4


def test_noise_is_finite_for_extreme_keys() -> None:
    keys = [-(2**63), -1, 0, 1, 2**53, 2**63 - 1]
    assert noise_of(keys, [0, 1, 2**31, 2**40, 0, 10_000_000], 200_000).isfinite().all()


def test_noise_follows_the_gumbel_distribution() -> None:
    counts, _ = np.histogram(uniforms(list(range(20_000)), [17] * 20_000), bins=200, range=(0, 1))
    expected = counts.sum() / 200
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 199) / np.sqrt(2 * 199) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 256, 65_536, 2**32])
def test_nearby_seeds_are_uncorrelated(step: int) -> None:
    seeds = list(range(0, 20_000))
    assert correlation_z(uniforms(seeds, [3] * 20_000), uniforms([s + step for s in seeds], [3] * 20_000)) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 64, 4096])
def test_nearby_positions_are_uncorrelated(step: int) -> None:
    positions = list(range(20_000))
    seeds = [11] * 20_000
    assert correlation_z(uniforms(seeds, positions), uniforms(seeds, [p + step for p in positions])) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 7, 32])
def test_nearby_tokens_are_uncorrelated(step: int) -> None:
    noise = uniforms(list(range(20_000)), [5] * 20_000)
    assert correlation_z(noise[:, :-step], noise[:, step:]) < MAX_Z


def test_a_seed_and_a_position_are_not_interchangeable() -> None:
    keys = list(range(2_000))
    assert correlation_z(uniforms(keys, [5] * 2_000), uniforms([5] * 2_000, keys)) < MAX_Z


def test_samples_of_a_uniform_distribution_are_uniform() -> None:
    """Of 1,024 equally likely tokens, each is sampled equally often. Sensitive to ties and to weak low bits."""
    samples = np.concatenate(
        [noise_of(list(range(s, s + 4_000)), [1] * 4_000, 1_024).argmax(-1).numpy() for s in range(0, 40_000, 4_000)]
    )
    counts = np.bincount(samples, minlength=1_024)
    expected = len(samples) / 1_024
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1_023) / np.sqrt(2 * 1_023) < MAX_Z
