"""Out-of-memory errors of all allocators name the next option to lower, with values for the configuration."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError
from specray.llm import LLM
from specray.worker.memory import advice, await_freed_memory, enough_memory, options_to_lower
from tests.support.engine import make_llm

LARGE_TREE = {
    "algorithm": "EAGLE3",
    "draft_model_path": "head",
    "num_steps": 5,
    "eagle_topk": 8,
    "num_draft_tokens": 64,
}
SMALL = {
    "mem_fraction_static": 0.1,
    "max_running_requests": 4,
    "chunked_prefill_size": 128,
    "max_prefill_tokens": 128,
    "quantization": "int8",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu"}, "lower mem_fraction_static=0.4 to 0.2"),
        ({"device": "cuda"}, "lower mem_fraction_static=0.85 to 0.5"),
        ({"mem_fraction_static": 0.9}, "lower mem_fraction_static=0.9 to 0.5"),
        ({"max_total_tokens": 5000}, "lower max_total_tokens=5000 to 2500"),
        (
            {"mem_fraction_static": 0.1, "speculative": LARGE_TREE},
            "draft less than speculative.num_steps=5, eagle_topk=8, num_draft_tokens=64, such as 3, 1, 4",
        ),
        (
            {"speculative": {"drafters": [{"name": "a", "algorithm": "NGRAM", "num_draft_tokens": 12}]}},
            "lower speculative.drafters.a.num_draft_tokens=12 to 4",
        ),
        ({"mem_fraction_static": 0.1, "max_running_requests": 48}, "lower max_running_requests=48 to 12"),
        (
            {"mem_fraction_static": 0.1, "max_running_requests": 4},
            "lower chunked_prefill_size=512 and max_prefill_tokens=2048 to 128",
        ),
        (SMALL | {"dtype": "float32"}, "replace dtype=float32 by bfloat16 or float16"),
        (SMALL | {"quantization": None}, "replace quantization=null by int8 on a CPU or fp8 on a GPU"),
        (SMALL, "take a smaller model or a machine with more memory"),
    ],
)
def test_options_are_lowered_in_order(options: dict[str, Any], expected: str) -> None:
    config = EngineConfig(**options)
    assert options_to_lower(config)[0] == expected
    assert advice(config).startswith(f"next, {expected}")


def test_the_advice_has_all_steps_of_sglangs_in_its_order() -> None:
    """Each of them names an option that there is."""
    eagle = LARGE_TREE | {"algorithm": "EAGLE"}
    steps = options_to_lower(EngineConfig(device="cuda", dtype="float32", speculative=eagle))
    names = [
        name
        for step in steps
        for name in re.findall(r"[a-z_.]+(?==)|(?<=set )[a-z_.]+", step)
        if "draft less" not in step
    ]
    assert steps[0].startswith("draft less than speculative.num_steps=")
    assert names == [
        "mem_fraction_static",
        "cuda_graph_max_bs",
        "max_running_requests",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "quantization",
        "speculative.draft_model_quantization",
        "dtype",
        "speculative.token_map",
    ]
    for name in names:
        fields = SpeculativeConfig.model_fields if name.startswith("speculative.") else EngineConfig.model_fields
        assert name.removeprefix("speculative.") in fields


def test_steps_that_would_change_nothing_are_left_out() -> None:
    drafted = {"algorithm": "EAGLE3", "draft_model_path": "head"}
    on_cpu = options_to_lower(EngineConfig(device="cpu", quantization="int8", speculative=drafted))
    assert not [step for step in on_cpu if "graph" in step or "draft" in step or "token_map" in step]
    drafted["draft_model_quantization"] = "unquant"
    [step] = [
        step
        for step in options_to_lower(EngineConfig(device="cuda", disable_cuda_graph=True, speculative=drafted))
        if "graph" in step or "draft" in step
    ]
    assert step.startswith("replace speculative.draft_model_quantization=unquant by int8")


def test_a_pool_larger_than_memory_is_refused_with_advice(toy: Path) -> None:
    """The pool is larger than any address space."""
    with pytest.raises(ConfigError, match=r"out of memory while loading .* next, lower max_total_tokens=1000000000 to"):
        LLM(model=str(toy), max_total_tokens=10**9, max_running_requests=4096, page_size=1, device="cpu")


def test_out_of_memory_in_a_step_ends_the_engine_with_advice(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(toy) as llm:
        monkeypatch.setattr(llm._executor.worker, "begin", lambda _: torch.empty(2**50))
        with pytest.raises(EngineDeadError, match=r"out of memory while computing a step: .* next, lower"):
            llm.generate([[0, 1]])


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**50), lambda: np.zeros(2**50)])
def test_errors_of_every_allocator_are_recognized(allocate: Any) -> None:
    with pytest.raises(ConfigError, match="next, lower"), enough_memory(EngineConfig(), "trying", ConfigError):
        allocate()


def test_other_errors_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match="another error"), enough_memory(EngineConfig(), "trying", ConfigError):
        raise RuntimeError("another error")


@pytest.mark.parametrize(
    ("free", "waited_s"),
    [
        ([90], 0),  # of 100
        ([20, 20, 40, 60, 86], 4),
        ([20, 30, *[30] * 100], 6),  # another process has the rest
        ([50, *[40] * 100], 5),  # a drafter loads on the same device
    ],
)
def test_memory_that_becomes_free_is_waited_for(free: list[int], waited_s: int) -> None:
    """Polls are a second apart here."""
    now = 0

    def sleep(_: float) -> None:
        nonlocal now
        now += 1

    config = EngineConfig(device="cuda", mem_fraction_static=0.85)
    await_freed_memory(config, lambda: (free[now], 100), lambda: float(now), sleep)
    assert now == waited_s
