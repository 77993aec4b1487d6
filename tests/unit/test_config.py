"""Options are refused at load when they cannot work, with the value seen and the fix."""

import pytest
from pydantic import ValidationError

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode import DRAFTERS, check_algorithm, make_drafter


def test_the_defaults_are_a_complete_configuration() -> None:
    assert EngineConfig() == EngineConfig.model_validate_json(EngineConfig().model_dump_json())


@pytest.mark.parametrize(
    "options",
    [
        {"page_sizes": 16},
        {"speculative": {"num_speps": 3}},
        {"page_size": 0},
        {"page_size": 1025},
        {"tp_size": 0},
        {"dtype": "int8"},
        {"model": ""},
        {"context_length": 1},
        {"mem_fraction_static": 1.0},
        {"mem_fraction_static": 0.0},
        {"max_running_requests": 0},
        {"max_queued_requests": -1},
        {"chunked_prefill_size": 0},
        {"speculative": {"algorithm": "NGRAM", "num_draft_tokens": 1}},
        {"speculative": {"algorithm": "NGRAM", "num_draft_tokens": 65}},
    ],
)
def test_unknown_keys_and_values_out_of_bounds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunked_prefill_size": 4096, "max_prefill_tokens": 2048}, ["4096", "2048", "raise max_prefill_tokens"]),
        ({"max_total_tokens": 16, "page_size": 16}, ["max_total_tokens=16", "page_size=16", ">= 17"]),
        ({"speculative": {"num_draft_tokens": 4}}, ["num_draft_tokens=4", "algorithm", "NGRAM"]),
    ],
)
def test_options_that_contradict_each_other_say_what_to_change(options: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(**options)
    assert all(part in str(caught.value) for part in said)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        EngineConfig().page_size = 8  # type: ignore[misc]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="NGRAM"):
        check_algorithm(SpeculativeConfig(algorithm="MAGIC"))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_method_can_be_made_and_keeps_its_limit(name: str) -> None:
    drafter = make_drafter(SpeculativeConfig(algorithm=name, num_draft_tokens=5))
    assert drafter is not None
    assert drafter.max_draft_tokens == 4


def test_no_algorithm_makes_no_drafter() -> None:
    assert make_drafter(SpeculativeConfig()) is None
