"""Greedy steps keep no logits: the tokens that the output matrix's product finds are those of the largest logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.models.fused_forward import FusedForward
from specray.ops.cpu.library import kernels
from specray.ops.step_tensors import LargestLogits
from specray.sampling_params import SamplingParams
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
    start = FusedForward.start

    def both(forward: FusedForward, *inputs: Any) -> Any:
        *step, only_largest, _, read_lens = inputs
        assert only_largest
        number, (_, whole, _) = start(forward, *step, False, None, read_lens)
        forward.wait(number)
        number, found = start(forward, *inputs)
        forward.wait(number)
        assert isinstance(whole, torch.Tensor)
        assert isinstance(found[1], LargestLogits)
        assert torch.equal(found[1].token_ids, whole.argmax(-1))
        compared.append(len(whole))
        return number, found

    monkeypatch.setattr(FusedForward, "start", both)
    drafts = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    with make_llm(toy, **options, **drafts, num_threads=num_threads, disable_overlap_schedule=True) as llm:
        llm.generate(PROMPTS, GREEDY)
    assert max(compared) > 16 or method is None  # more rows than are screened
    assert min(compared) <= 3
