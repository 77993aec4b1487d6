"""Invalid options are refused when the configuration is loaded, with the value and the fix."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.registry import load_config
from specray.spec_decode import DRAFTERS, check_speculative
from specray.worker.memory_plan import Demand, demand_of
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
        ({"max_mamba_cache_size": 47}, ["max_mamba_cache_size=47", "max_running_requests=48"]),
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
        ({"algorithm": "NGRAM", "merged_draft_tokens": 14}, ["merged_draft_tokens=14", "no effect"]),
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
    assert speculative.max_num_nodes is None or speculative.max_num_nodes <= limit + 1
    assert speculative.drafters or speculative.num_nodes in (None, limit + 1)


def test_no_algorithm_makes_no_drafter(toy: Path) -> None:
    check_speculative(SpeculativeConfig())
    with make_llm(toy) as llm:
        assert llm.engine.capacity.max_draft_tokens == 0


LOOKUP, COPY = {"name": "lookup", "algorithm": "NGRAM"}, {"name": "copy", "algorithm": "NGRAM", "num_draft_tokens": 20}
HEAD = {"name": "head", "algorithm": "EAGLE3", "draft_model_path": "x"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "NGRAM", "drafters": [LOOKUP]}, "algorithm='NGRAM' is an option of a single drafter"),
        ({"num_steps": 3, "drafters": [LOOKUP]}, "num_steps=3 is an option of a single drafter, but .* lookup; move"),
        ({"drafters": [LOOKUP, LOOKUP]}, "two of them are named 'lookup'"),
        ({"drafters": [LOOKUP | {"name": "none"}]}, "none cannot be a drafter's name"),
        ({"drafters": [LOOKUP | {"name": "a b"}]}, "drafters.0.name"),
        ({"drafters": [{"name": "head"}]}, "drafters.0.algorithm"),
        ({"drafters": [LOOKUP | {"budget": "auto"}]}, "drafters.0.budget"),
        ({"drafters": [LOOKUP | {"name": f"n{i}"} for i in range(9)]}, "at most 8"),
        ({"drafters": [LOOKUP | {"algorithm": "NGRM"}]}, "drafters, lookup: .*'NGRM' is not known"),
        ({"drafters": [LOOKUP, LOOKUP | {"name": "b", "eagle_topk": 2}]}, "drafters, b: .*eagle_topk=2 has no effect"),
        ({"drafters": [LOOKUP, HEAD | {"num_steps": 3}]}, "drafters, head: .*eagle_topk, num_draft_tokens is not set"),
        ({"drafters": [LOOKUP], "default_drafter": "x"}, "default_drafter='x' is not one of .* choose one of lookup"),
        ({"default_drafter": "x"}, "drafters, which is empty"),
        ({"drafters": [LOOKUP], "shadow": {"drafter": "lookup"}}, "leaves no drafter to verify"),
        (
            {"drafters": [LOOKUP, COPY], "default_drafter": "copy", "shadow": {"drafter": "copy"}},
            "leaves no drafter to verify",
        ),
        (
            {"drafters": [LOOKUP, COPY], "shadow": {"drafter": "copy"}, "verification": "rejection"},
            "only where verification is coupled",
        ),
        ({"drafters": [LOOKUP, COPY], "shadow": {"drafter": "copy", "share": 0}}, "shadow.share"),
        ({"shadow": {"share": 0.2}}, "shadow=.* has no effect"),
        ({"algorithm": "NGRAM", "shadow": {"share": 0.2}}, "shadow=.* has no effect with algorithm=NGRAM"),
    ],
)
def test_contradictions_of_several_drafters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValidationError)) as caught:
        check_speculative(SpeculativeConfig.model_validate(options))
    assert re.search(message, str(caught.value), re.S), str(caught.value)


def test_each_of_several_drafters_has_its_own_options_and_the_shared_ones() -> None:
    config = SpeculativeConfig.model_validate({"drafters": [LOOKUP, COPY], "budget": "auto", "default_drafter": "copy"})
    assert list(config.members) == ["copy", "lookup"]  # the default first
    assert [member.num_draft_tokens for member in config.members.values()] == [20, None]
    assert {(member.budget, member.algorithm) for member in config.members.values()} == {("auto", "NGRAM")}
    assert config.max_num_nodes == 20
    assert config.drafter_name == "lookup+copy"
    single = SpeculativeConfig(algorithm="my.module:Drafter")
    assert single.members == {"my-module-drafter": single}
    assert SpeculativeConfig().members == {}


def test_memory_is_planned_for_each_of_several_drafters(toy: Path, tmp_path: Path) -> None:
    def demand(speculative: SpeculativeConfig) -> Demand:
        config = EngineConfig(model=str(toy), device="cpu", dtype="float32", speculative=speculative)
        with make_llm(toy) as llm:
            shape = llm._executor.worker.model.shape
        options = (load_config(toy), shape, toy, torch.float32, torch.device("cpu"), RankGroup(), False)
        return demand_of(config, *options)

    several = METHODS["SEVERAL"](toy, tmp_path)
    plain, both = demand(SpeculativeConfig()), demand(several)
    alone = [demand(member) for member in several.members.values()]
    assert sum(part.weights > 0 for part in alone) == 2
    assert both.weights == sum(part.weights for part in alone)
    assert both.token - plain.token == sum(part.token - plain.token for part in alone)


def test_a_successor_may_have_several_drafters_but_no_new_code() -> None:
    ours = SpeculativeConfig.model_validate({"drafters": [LOOKUP, {"name": "own", "algorithm": "m:Drafter"}]})
    ours.check_successor(SpeculativeConfig.model_validate({"drafters": [{"name": "x", "algorithm": "m:Drafter"}]}))
    other = SpeculativeConfig.model_validate({"drafters": [LOOKUP, {"name": "own", "algorithm": "m:Other"}]})
    with pytest.raises(ConfigError, match="'m:Other' is an import path"):
        ours.check_successor(other)


def test_a_changed_copy_is_validated_as_a_whole() -> None:
    """`model_copy(update=)` accepts anything."""
    config = SpeculativeConfig(algorithm="NGRAM", budget="auto")
    assert with_values(config, num_draft_tokens=5) == SpeculativeConfig(
        algorithm="NGRAM", budget="auto", num_draft_tokens=5
    )
    wrong: tuple[dict[str, Any], ...] = ({"num_draft_tokens": 1}, {"algorithm": None}, {"no_such_option": 1})
    for options in wrong:
        with pytest.raises(ValidationError):
            with_values(config, **options)


def test_no_copy_of_a_configuration_escapes_validation() -> None:
    """Bodies of requests are copied with values that are validated already."""
    root = Path(__file__).parents[2]
    sources = [path for package in ("specray", "cluster") for path in (root / package).rglob("*.py")]
    unchecked = {str(path.relative_to(root)) for path in sources if "model_copy(" in path.read_text()}
    assert unchecked == {
        f"specray/server/{name}.py" for name in ("schemas/body", "generate/protocol", "responses/protocol")
    }


def test_gpus_have_defaults_of_their_own() -> None:
    """Once it is known that there is one, and where nothing else is set."""

    def sizes(config: EngineConfig) -> tuple[int, int, int]:
        return config.max_running_requests, config.chunked_prefill_size, config.max_prefill_tokens

    assert sizes(EngineConfig()) == sizes(EngineConfig(device="cpu")) == (48, 512, 2048)
    assert sizes(with_values(EngineConfig(), device="cuda")) == (200, 8192, 16384)
    assert sizes(EngineConfig(device="cuda", max_running_requests=3)) == (3, 8192, 16384)
    assert sizes(EngineConfig(device="cuda", max_prefill_tokens=4096)) == (200, 4096, 4096)
    assert sizes(EngineConfig(device="cuda", chunked_prefill_size=512)) == (200, 512, 16384)
