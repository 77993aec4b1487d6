"""Greedy steps keep no logits: the tokens that the output matrix's product finds are those of the largest logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.ops.cpu.library import kernels
from specray.ops.step_tensors import LargestLogits
from specray.sampling_params import SamplingParams
from specray.worker.input_batch import InputBatch
from specray.worker.model_runner import ForwardOutput, KernelRunner
from tests.support.engine import make_llm
from tests.support.methods import METHODS

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [5], list(range(40))]


@pytest.mark.skipif(kernels() is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("method", [None, "EAGLE3"])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=["float32", "bfloat16", "int8"],
)
def test_tokens_are_those_of_the_largest_logits(
    toy: Path,
    tmp_path: Path,
    method: str | None,
    num_threads: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    start = KernelRunner.start

    def both(
        runner: KernelRunner, batch: InputBatch, layers: Sequence[int], only_largest: bool, verification: Any
    ) -> tuple[int, ForwardOutput]:
        assert only_largest
        number, whole = start(runner, batch, layers, False)
        runner.wait(number)
        number, found = start(runner, batch, layers, True, verification)
        runner.wait(number)
        assert isinstance(whole.logits, torch.Tensor)
        assert isinstance(found.logits, LargestLogits)
        assert torch.equal(found.logits.token_ids, whole.logits.argmax(-1))
        compared.append(len(whole.logits))
        return number, found

    monkeypatch.setattr(KernelRunner, "start", both)
    drafts = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    with make_llm(toy, **options, **drafts, num_threads=num_threads, disable_overlap_schedule=True) as llm:
        llm.generate(PROMPTS, GREEDY)
    assert max(compared) > 16 or method is None  # more rows than are screened
    assert min(compared) <= 3
