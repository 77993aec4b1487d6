"""Out-of-memory errors of all allocators name the next option to lower, with values for the configuration."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specray.config import EngineConfig
from specray.errors import ConfigError, EngineDeadError
from specray.llm import LLM
from specray.worker.memory import advice, enough_memory, options_to_lower
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
            "draft less than num_steps=5, eagle_topk=8, num_draft_tokens=64, such as 3, 1, 4",
        ),
        (
            {"mem_fraction_static": 0.1, "speculative": {"algorithm": "NGRAM", "num_draft_tokens": 12}},
            "lower speculative.num_draft_tokens=12 to 4",
        ),
        ({"mem_fraction_static": 0.1, "max_running_requests": 48}, "lower max_running_requests=48 to 12"),
        (
            {"mem_fraction_static": 0.1, "max_running_requests": 4},
            "lower chunked_prefill_size=512 and max_prefill_tokens=2048 to 128",
        ),
        (SMALL | {"dtype": "float32"}, "replace dtype=float32 by bfloat16"),
        (SMALL | {"quantization": None}, "replace quantization=null by int8 on a CPU or fp8 on a GPU"),
        (SMALL, "take a smaller model or a machine with more memory"),
    ],
)
def test_options_are_lowered_in_order(options: dict[str, Any], expected: str) -> None:
    config = EngineConfig(**options)
    assert options_to_lower(config)[0] == expected
    assert advice(config).startswith(f"next, {expected}")


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
