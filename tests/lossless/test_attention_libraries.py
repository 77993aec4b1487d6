"""The whole engine on models of flashinfer's and flash-attention's calls: the tokens are those of the torch kernels.

The models are those of `tests.support.attention_libraries`. Triton's kernels run in its interpreter.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from specray.config import SpeculativeConfig
from specray.ops import backends
from specray.ops.gpu.attention import TritonAttend
from specray.sampling_params import SamplingParams
from tests.support import attention_libraries
from tests.support.engine import generate, make_llm
from tests.support.graph_stand_in import GraphsAtOnce, RepeatedCall
from tests.support.methods import METHODS

PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [0, *range(4, 20)]]
PARAMS = [SamplingParams(temperature=0.8 * i, seed=i, max_tokens=6, ignore_eos=True) for i in range(2)]
CHAIN = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was planned, with both libraries in place as on a GPU."""
    counts: Counter[str] = Counter()
    library: Any = attention_libraries
    monkeypatch.setattr(backends, "_library", lambda *_: library)
    monkeypatch.setattr("specray.ops.gpu.flashinfer_attention.HEAD_DIMS", (8, 16))
    plan, attend = library.BatchPrefillWithPagedKVCacheWrapper.plan, library.flash_attn_varlen_func
    start = TritonAttend.__init__

    def plan_flashinfer(self: Any, *args: Any, **options: Any) -> None:
        counts["causal" if options["causal"] else "masked"] += 1
        plan(self, *args, **options)

    def plan_triton(self: TritonAttend, *args: Any, **options: Any) -> None:
        counts["triton"] += 1
        start(self, *args, **options)

    def attend_with_fa(*args: Any, **options: Any) -> Any:
        counts["fa"] += 1
        return attend(*args, **options)

    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "plan", plan_flashinfer)
    monkeypatch.setattr(library, "flash_attn_varlen_func", attend_with_fa)
    monkeypatch.setattr(TritonAttend, "__init__", plan_triton)
    return counts


@pytest.mark.parametrize(
    ("backend", "mode", "drafts", "kernels"),
    [
        ("flashinfer", "prefill", {}, {"causal", "masked"}),
        ("flashinfer", "prefill", CHAIN, {"causal"}),
        ("flashinfer", "decode", CHAIN, {"causal", "triton"}),
        ("fa", "prefill", {}, {"fa", "triton"}),
        ("fa", "prefill", CHAIN, {"fa"}),
    ],
)
def test_the_tokens_are_those_of_torch(
    backend: str,
    mode: str,
    drafts: dict[str, int],
    kernels: set[str],
    toy: Path,
    tmp_path: Path,
    planned: Counter[str],
) -> None:
    expected = [choice.token_ids for choice in generate(toy, PROMPTS, PARAMS, attention_backend="torch")]
    assert not planned
    options = METHODS["EAGLE3"](toy, tmp_path).model_dump() | drafts
    speculative = SpeculativeConfig(**options | {"attention_mode": mode, "draft_attention_backend": "torch"})
    seen = generate(toy, PROMPTS, PARAMS, attention_backend=backend, speculative=speculative)
    assert [choice.token_ids for choice in seen] == expected
    assert set(planned) == kernels


def test_a_draft_head_reads_its_prefix_with_flashinfer(toy: Path, tmp_path: Path, planned: Counter[str]) -> None:
    """Its KV slots may lie anywhere; the levels of its trees are Triton's."""
    expected = [choice.token_ids for choice in generate(toy, PROMPTS, PARAMS)]
    options = METHODS["EAGLE3"](toy, tmp_path).model_dump() | CHAIN | {"draft_attention_backend": "flashinfer"}
    seen = generate(toy, PROMPTS, PARAMS, attention_backend="torch", speculative=SpeculativeConfig(**options))
    assert [choice.token_ids for choice in seen] == expected
    assert set(planned) == {"causal", "triton"}


@pytest.mark.parametrize("backend", ["flashinfer", "fa"])
def test_decode_steps_in_graphs_are_tritons(
    backend: str, toy: Path, tmp_path: Path, planned: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries plan on the host, which a graph would not repeat. Prompts stay theirs."""
    expected = [choice.token_ids for choice in generate(toy, PROMPTS, PARAMS)]
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")  # the CPU kernels have no graphs
    monkeypatch.setattr("specray.worker.startup.make_graphs", lambda *_: GraphsAtOnce(RepeatedCall))
    options = METHODS["EAGLE3"](toy, tmp_path).model_dump() | CHAIN | {"draft_attention_backend": "torch"}
    speculative = SpeculativeConfig(**options)
    # A warm-up reads a chunk in Triton's interpreter.
    sizes = {"max_running_requests": 1, "context_length": 64, "chunked_prefill_size": 8}
    with make_llm(toy, attention_backend=backend, speculative=speculative, **sizes) as llm:
        seen = [each.choices[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]
        assert llm._executor.capacity.without_graphs == ()
    assert seen == expected
    library = "causal" if backend == "flashinfer" else "fa"
    assert set(planned) == {library, "triton"}
