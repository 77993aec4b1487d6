"""Invalid options are refused when the configuration is loaded, with the value and the fix."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode import DRAFTERS, check_speculative
from tests.support.engine import make_llm
from tests.support.methods import METHODS


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
        {"speculative": {"algorithm": "NGRAM", "num_draft_tokens": 129}},
        {"speculative": {"algorithm": "NGRAM", "ngram_match_type": "DFS"}},
        {"speculative": {"algorithm": "NGRAM", "ngram_min_match_window_size": 0}},
        {"speculative": {"algorithm": "NGRAM", "ngram_capacity": 10}},
        {"speculative": {"algorithm": "NGRAM", "ngram_max_spec_factor": 0}},
        {"speculative": {"algorithm": "EAGLE3", "num_steps": 0}},
        {"speculative": {"algorithm": "EAGLE3", "eagle_topk": 33}},
        {"speculative": {"algorithm": "EAGLE3", "draft_load_format": "gguf"}},
    ],
)
def test_unknown_keys_and_values_out_of_bounds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"chunked_prefill_size": 4096, "max_prefill_tokens": 2048}, ["4096", "2048", "raise max_prefill_tokens"]),
        ({"max_total_tokens": 16, "page_size": 16}, ["max_total_tokens=16", "page_size=16", ">= 17"]),
        ({"deterministic": True, "quantization": "fp8"}, ["deterministic=true", "fp8", "set quantization: null"]),
        ({"speculative": {"num_draft_tokens": 4}}, ["num_draft_tokens=4", "algorithm", "NGRAM"]),
    ],
)
def test_contradicting_options_are_refused_with_the_fix(options: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(**options)
    assert all(part in str(caught.value) for part in parts)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        EngineConfig().page_size = 8  # type: ignore[misc]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"EAGLE3, EAGLE, .*STANDALONE, NGRAM"):
        check_speculative(SpeculativeConfig(algorithm="MAGIC"))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"algorithm": "NGRAM", "eagle_topk": 4}, ["eagle_topk=4", "NGRAM", "remove it", "num_draft_tokens"]),
        ({"algorithm": "NGRAM", "draft_model_path": "x"}, ["draft_model_path='x'", "no effect"]),
        ({"algorithm": "NGRAM", "ngram_override_min_match": 4}, ["ngram_override_min_match=4", "no effect"]),
        ({"algorithm": "EAGLE3"}, ["EAGLE3", "draft_model_path is null"]),
        ({"algorithm": "MTP", "num_steps": 3}, ["eagle_topk, num_draft_tokens is not set"]),
        ({"algorithm": "EAGLE3", "draft_model_path": "x", "num_steps": 3}, ["eagle_topk, num_draft_tokens is not set"]),
    ],
)
def test_options_that_a_method_ignores_or_lacks_are_refused(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_speculative(SpeculativeConfig(**options))
    assert all(part in str(caught.value) for part in parts)


def test_every_method_is_tested() -> None:
    """METHODS has at least one entry per drafter."""
    assert set(METHODS) >= set(DRAFTERS)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_reports_its_maximum_of_draft_tokens(name: str, toy: Path, tmp_path: Path) -> None:
    speculative = METHODS[name](toy, tmp_path)
    check_speculative(speculative)
    with make_llm(toy, speculative=speculative) as llm:
        limit = llm.engine.capacity.max_draft_tokens
    assert limit > 0
    assert speculative.num_draft_tokens in (None, limit + 1)


def test_no_algorithm_makes_no_drafter(toy: Path) -> None:
    check_speculative(SpeculativeConfig())
    with make_llm(toy) as llm:
        assert llm.engine.capacity.max_draft_tokens == 0
