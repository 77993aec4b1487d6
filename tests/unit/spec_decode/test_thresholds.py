"""ThresholdSampler: as much more is accepted as they say, at 1.0 nothing, and never where the target has no choice."""

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
from specray.spec_decode.samplers import make_sampler
from specray.spec_decode.thresholds import ThresholdSampler
from tests.support.distributions import MAX_Z, OPTIONS, worst_z
from tests.support.engine import make_llm
from tests.support.sampling import state_of, verify_rows

NUM_ROWS = 4_000
PROBS = np.array([0.35, 0.2, 0.1, 0.3, 0.05])
LOGITS = torch.tensor(np.log(PROBS), dtype=torch.float32)
SIBLINGS = [1, 2]  # together 0.3


def first_tokens(sampler: NodeSampler, siblings: list[int] = SIBLINGS, temperature: float = 1.0) -> np.ndarray:
    """Counts of the token chosen at a root with these children, over many seeds."""
    tree = TreeLists([0, *siblings], [NONE, *[0] * len(siblings)])
    options = [OPTIONS._replace(seed=seed, temperature=temperature) for seed in range(NUM_ROWS)]
    states = [state_of(o, [4, 0], 1, len(PROBS)) for o in options]
    logits = LOGITS.repeat(NUM_ROWS * len(tree.tokens), 1)
    verified = verify_rows(logits, [tree] * NUM_ROWS, states, [2] * NUM_ROWS, sampler)
    return np.bincount([output.token_ids[0] for output in verified], minlength=len(PROBS))


def test_at_one_each_nothing_but_the_targets_own_token_is_taken() -> None:
    assert np.array_equal(first_tokens(ThresholdSampler(1.0, 1.0)), first_tokens(coupled))
    assert make_sampler(SpeculativeConfig(algorithm="NGRAM")) is coupled


def test_acc_divides_what_siblings_need_together() -> None:
    """S = 0.3 of which acc = 0.5 makes 0.6: the 0.3 more are taken from the others in proportion, for the siblings as
    the rule walks them: u in [0.3, 0.4) is below 0.2 / 0.5, and [0.4, 0.6) below 0.3 / 0.5."""
    expected = PROBS * (1 - 0.6) / (1 - 0.3)
    expected[SIBLINGS] = [0.2 + 0.1, 0.1 + 0.2]
    assert worst_z(first_tokens(ThresholdSampler(1.0, 0.5)), expected) < MAX_Z
    assert worst_z(first_tokens(coupled), expected) > MAX_Z


def test_single_takes_every_sibling_that_is_so_likely() -> None:
    expected = np.zeros(len(PROBS))
    expected[[1, 2]] = [0.9, 0.1]  # all but what is sampled as the other sibling
    assert worst_z(first_tokens(ThresholdSampler(0.2, 1.0)), expected) < MAX_Z


def test_a_greedy_request_gets_its_arg_max_whatever_the_thresholds() -> None:
    assert first_tokens(ThresholdSampler(0.01, 0.01), temperature=0.0)[0] == NUM_ROWS


@pytest.mark.parametrize(
    ("probabilities", "single", "acc", "place"),
    [([0.0, 0.1], 0.05, 1.0, 1), ([0.0], 1.0, 0.1, -1), ([0.3, 0.3], 1.0, 0.6, 1), ([], 0.1, 0.1, -1)],
)
def test_siblings_are_walked_in_order_and_the_impossible_is_passed(
    probabilities: list[float], single: float, acc: float, place: int
) -> None:
    probs, uniforms = torch.tensor([probabilities], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    assert ThresholdSampler(single, acc).first_likely(probs, uniforms).tolist() == [place]


def test_what_is_sampled_by_thresholds_is_said_to_be_lossy(toy: Path) -> None:
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


def test_a_drafter_may_be_replaced_or_left_out_while_serving_but_not_the_verifier() -> None:
    serving = SpeculativeConfig(algorithm="NGRAM", accept_threshold_acc=0.5)
    serving.check_successor(serving.model_copy(update={"num_draft_tokens": 3}))
    serving.check_successor(SpeculativeConfig())
    for other in (SpeculativeConfig(algorithm="NGRAM"), SpeculativeConfig(algorithm="NGRAM", verification="rejection")):
        with pytest.raises(ConfigError, match="in a running server"):
            serving.check_successor(other)


def test_uniforms_are_uniform_and_no_two_alike() -> None:
    seeds, positions, columns = torch.arange(40)[:, None, None], torch.arange(40)[:, None], torch.arange(10)
    drawn = uniform(seeds, positions, columns).flatten().numpy()
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert worst_z(np.histogram(drawn, 20, (0, 1))[0], np.full(20, 1 / 20)) < MAX_Z
