"""ThresholdSampler: distributions at different thresholds, greedy requests, and how lossy output is reported."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.ops.noise import uniform
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.thresholds import ThresholdSampler
from specray.spec_decode.verifier import make_sampler
from tests.support.distributions import MAX_Z, OPTIONS, worst_z
from tests.support.engine import make_llm
from tests.support.sampling import state_of, verify_rows

NUM_ROWS = 4_000
PROBS = np.array([0.35, 0.2, 0.1, 0.3, 0.05])
LOGITS = torch.tensor(np.log(PROBS), dtype=torch.float32)
SIBLINGS = [1, 2]  # total probability 0.3


def first_tokens(sampler: NodeSampler, siblings: list[int] = SIBLINGS, temperature: float = 1.0) -> np.ndarray:
    """Counts of the token sampled at a root with these children, over many seeds."""
    tree = TreeLists([0, *siblings], [NONE, *[0] * len(siblings)])
    options = [OPTIONS._replace(seed=seed, temperature=temperature) for seed in range(NUM_ROWS)]
    states = [state_of(o, [4, 0], 1, len(PROBS)) for o in options]
    logits = LOGITS.repeat(NUM_ROWS * len(tree.tokens), 1)
    verified = verify_rows(logits, [tree] * NUM_ROWS, states, [2] * NUM_ROWS, sampler)
    return np.bincount([output.token_ids[0] for output in verified], minlength=len(PROBS))


def test_thresholds_of_1_sample_the_targets_token() -> None:
    assert np.array_equal(first_tokens(ThresholdSampler(1.0, 1.0)), first_tokens(coupled))
    assert make_sampler(SpeculativeConfig(algorithm="NGRAM")) is coupled


def test_acc_divides_the_cumulative_probability_of_siblings() -> None:
    """With acc = 0.5, the siblings are accepted with a probability of 0.3 / 0.5 = 0.6 instead of 0.3.

    The first gains u in [0.3, 0.4), up to 0.2 / 0.5, and the second u in [0.4, 0.6), up to 0.3 / 0.5. The other tokens
    share the remaining 0.4 in proportion.
    """
    expected = PROBS * (1 - 0.6) / (1 - 0.3)
    expected[SIBLINGS] = [0.2 + 0.1, 0.1 + 0.2]
    assert worst_z(first_tokens(ThresholdSampler(1.0, 0.5)), expected) < MAX_Z
    assert worst_z(first_tokens(coupled), expected) > MAX_Z


def test_single_accepts_every_sibling_above_it() -> None:
    expected = np.zeros(len(PROBS))
    expected[[1, 2]] = [0.9, 0.1]  # unless the other sibling is sampled
    assert worst_z(first_tokens(ThresholdSampler(0.2, 1.0)), expected) < MAX_Z


def test_greedy_requests_ignore_thresholds() -> None:
    assert first_tokens(ThresholdSampler(0.01, 0.01), temperature=0.0)[0] == NUM_ROWS


@pytest.mark.parametrize(
    ("probabilities", "single", "acc", "place"),
    [([0.0, 0.1], 0.05, 1.0, 1), ([0.0], 1.0, 0.1, -1), ([0.3, 0.3], 1.0, 0.6, 1), ([], 0.1, 0.1, -1)],
)
def test_siblings_are_tried_in_order_and_impossible_ones_are_skipped(
    probabilities: list[float], single: float, acc: float, place: int
) -> None:
    probs, uniforms = torch.tensor([probabilities], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    assert ThresholdSampler(single, acc).first_likely(probs, uniforms).tolist() == [place]


def test_sampling_with_thresholds_is_reported_as_lossy(toy: Path) -> None:
    params = [SamplingParams(seed=1, temperature=t, max_tokens=4) for t in (0.0, 1.0)]
    lossy = SpeculativeConfig(algorithm="NGRAM", accept_threshold_acc=0.5)
    for speculative, expected in ((lossy, [False, True]), (SpeculativeConfig(algorithm="NGRAM"), [False, False])):
        with make_llm(toy, speculative=speculative) as llm:
            usages = [g.choices[0].usage for g in llm.generate([[0, 5, 6]] * 2, params)]
            assert [usage and usage.is_lossy for usage in usages] == expected
            assert llm.engine.stats.values["specray_verification_is_lossy"] == speculative.is_lossy


def test_thresholds_and_rejection_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="verification: rejection"):
        SpeculativeConfig(algorithm="NGRAM", verification="rejection", accept_threshold_single=0.9)


def test_a_running_server_may_change_the_drafter_but_not_verification() -> None:
    serving = SpeculativeConfig(algorithm="NGRAM", accept_threshold_acc=0.5)
    serving.check_successor(serving.model_copy(update={"num_draft_tokens": 3}))
    serving.check_successor(SpeculativeConfig())
    for other in (SpeculativeConfig(algorithm="NGRAM"), SpeculativeConfig(algorithm="NGRAM", verification="rejection")):
        with pytest.raises(ConfigError, match="in a running server"):
            serving.check_successor(other)


def test_uniforms_are_distinct_and_uniformly_distributed() -> None:
    seeds, positions, columns = torch.arange(40)[:, None, None], torch.arange(40)[:, None], torch.arange(10)
    drawn = uniform(seeds, positions, columns).flatten().numpy()
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert worst_z(np.histogram(drawn, 20, (0, 1))[0], np.full(20, 1 / 20)) < MAX_Z
