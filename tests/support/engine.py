"""Engines for tests (small pools, float32, one thread), and the parts of outputs that tests compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.drafter import Drafter


def make_llm(folder: Path, drafter: Drafter | None = None, **options: Any) -> LLM:
    small: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 4096}
    return LLM(drafter=drafter, model=str(folder), **(small | options))


def generate(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Drafter | None = None,
    **options: Any,
) -> list[Completion]:
    """First choices of one run."""
    with make_llm(folder, drafter, **options) as llm:
        return [generation.choices[0] for generation in llm.generate(prompts, params)]


def visible(completion: Completion) -> tuple[object, ...]:
    """The parts of a choice that must not depend on how it was computed; without logprobs."""
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason, completion.seed
