"""The noise is Gumbel, a function of (seed, position, token) alone, and nothing in it is related to anything else."""

import numpy as np
import pytest
import torch

from specray.ops.noise import gumbel
from tests.support.law import MAX_Z

CPU = torch.device("cpu")
SIZE = 64


def uniforms(seeds: list[int], positions: list[int], vocab_size: int = SIZE) -> np.ndarray:
    """The noise carried back to what should be uniform on (0, 1)."""
    noise = gumbel(seeds, positions, vocab_size, CPU).double().numpy()
    return np.exp(-np.exp(-noise))


def correlation_z(left: np.ndarray, right: np.ndarray) -> float:
    """Correlation of two arrays in standard deviations of what independence gives."""
    return float(abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) * np.sqrt(left.size))


def test_equal_keys_give_equal_noise_in_any_batch() -> None:
    batch = gumbel([7, 8, 7], [3, 3, 4], SIZE, CPU)
    for row, (seed, position) in enumerate([(7, 3), (8, 3), (7, 4)]):
        assert torch.equal(batch[row], gumbel([seed], [position], SIZE, CPU)[0])


def test_a_larger_vocabulary_changes_no_token() -> None:
    assert torch.equal(gumbel([5], [9], SIZE, CPU), gumbel([5], [9], 1000, CPU)[:, :SIZE])


def test_noise_is_finite_for_the_hardest_keys() -> None:
    keys = [-(2**63), -1, 0, 1, 2**53, 2**63 - 1]
    assert gumbel(keys, [0, 1, 2**31, 2**40, 0, 10_000_000], 200_000, CPU).isfinite().all()


def test_noise_is_uniform_under_its_law() -> None:
    counts, _ = np.histogram(uniforms(list(range(20_000)), [17] * 20_000), bins=200, range=(0, 1))
    expected = counts.sum() / 200
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 199) / np.sqrt(2 * 199) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 256, 65_536, 2**32])
def test_neighbouring_seeds_are_unrelated(step: int) -> None:
    seeds = list(range(0, 20_000))
    assert correlation_z(uniforms(seeds, [3] * 20_000), uniforms([s + step for s in seeds], [3] * 20_000)) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 64, 4096])
def test_neighbouring_positions_are_unrelated(step: int) -> None:
    positions = list(range(20_000))
    seeds = [11] * 20_000
    assert correlation_z(uniforms(seeds, positions), uniforms(seeds, [p + step for p in positions])) < MAX_Z


@pytest.mark.parametrize("step", [1, 2, 7, 32])
def test_neighbouring_tokens_are_unrelated(step: int) -> None:
    noise = uniforms(list(range(20_000)), [5] * 20_000)
    assert correlation_z(noise[:, :-step], noise[:, step:]) < MAX_Z


def test_a_seed_and_a_position_are_not_interchangeable() -> None:
    keys = list(range(2_000))
    assert correlation_z(uniforms(keys, [5] * 2_000), uniforms([5] * 2_000, keys)) < MAX_Z


def test_the_winner_among_many_tokens_is_uniform() -> None:
    """Ties and low bits would show here first: over a flat law each of 4,096 tokens wins equally often."""
    winners = np.concatenate(
        [gumbel(list(range(s, s + 4_000)), [1] * 4_000, 4_096, CPU).argmax(-1).numpy() for s in range(0, 40_000, 4_000)]
    )
    counts = np.bincount(winners, minlength=4_096)
    expected = len(winners) / 4_096
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 4_095) / np.sqrt(2 * 4_095) < MAX_Z
