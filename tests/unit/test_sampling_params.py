"""Bounds of sampling options, and seeds."""

import pytest

from specray.errors import InvalidRequestError
from specray.sampling_params import SamplingParams, choice_seed, fresh_seed, make_sampling_params

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("temperature", [0, 0.7, 100.0], [-0.1, 100.1, NAN, INFINITY, "hot", None]),
        ("top_p", [0, 0.01, 1.0], [-0.1, 1.01, NAN]),
        ("top_k", [-1, 0, 2**31, 2**62], [-2, 1.5]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, INFINITY]),
        ("repetition_penalty", [0.1, 1000.0], [0.0, -1.0, 1000.1, NAN]),
        ("logit_bias", [{}, {3: -100.0}, {"3": 5}], [{3: 101.0}, {-1: 1.0}, {2**31: 1.0}, {3: NAN}, {"x": 1.0}]),
        ("seed", [None, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 0.5]),
        ("n", [1, 128], [0, 129]),
        ("max_tokens", [None, 0, 10_000_000], [-1, 10_000_001]),
        ("min_tokens", [0, 10_000_000], [-1, 10_000_001]),
        ("stop", [[], ["a"], ["a"] * 64], [[""], ["a"] * 65, ["a" * 257], "a"]),
        ("stop_token_ids", [[], [0, 2**31 - 1]], [[-1], [2**31], list(range(65))]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs_start", [0, 10_000_000], [-1, None]),
        ("allowed_token_ids", [None, [0], [2**31 - 1] * 1024], [[], [-1], [0] * 1025]),
    ],
)
def test_options_have_bounds(field: str, allowed: list[object], refused: list[object]) -> None:
    for value in allowed:
        make_sampling_params(**{field: value})
    for value in refused:
        with pytest.raises(InvalidRequestError) as caught:
            make_sampling_params(**{field: value})
        assert (caught.value.param or "").startswith(field)
        assert field in str(caught.value)


def test_at_most_three_hundred_biases_are_accepted() -> None:
    make_sampling_params(logit_bias=dict.fromkeys(range(300), 1.0))
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        make_sampling_params(logit_bias=dict.fromkeys(range(301), 1.0))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_sampling_params(temprature=1.0)
    assert caught.value.param == "temprature"


def test_top_p_zero_is_temperature_zero() -> None:
    assert make_sampling_params(top_p=0, temperature=1.5) == make_sampling_params(temperature=0.0)
    assert SamplingParams(top_p=0.0) == SamplingParams(temperature=0.0)


def test_a_top_k_above_any_vocabulary_excludes_nothing() -> None:
    assert {make_sampling_params(top_k=top_k).top_k for top_k in (1_000_001, 2**30, 2**62)} == {-1}


def test_seed_minus_one_asks_for_a_random_seed() -> None:
    assert make_sampling_params(seed=-1).seed is None


def test_the_constructor_validates_options() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1.0)


def test_fresh_seeds_differ_and_survive_a_json_double() -> None:
    seeds = [fresh_seed() for _ in range(1_000)]
    assert len(set(seeds)) == 1_000
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1])
def test_choices_have_different_valid_seeds_and_the_first_keeps_the_given_one(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(8)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 8
    for each in seeds:
        make_sampling_params(seed=each)
