"""Steps that torch.compile has compiled have the output of steps that it has not, on torch's operations on a CPU."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

from specray.config import SpeculativeConfig
from specray.layers.compiled import CompiledLayers
from specray.llm import LLM
from specray.models.causal_lm import CausalLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit
from specray.testing.conformance import GREEDY, PROMPTS, SAMPLED, require_equal
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS

SIZES = [1, 2, 4, 8, 16]  # of one and two requests with trees of one, four and eight nodes


class Engine:
    """An engine that is compiled by `backend` and in which compiling anything more is an error."""

    def __init__(self, folder: Path, speculative: SpeculativeConfig, backend: str, sizes: list[int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specray.models.compilation.CompiledLayers", partial(CompiledLayers, backend=backend))
            if backend != "inductor":
                patch.setattr("specray.models.compilation.inductor_options", lambda: None)
            if sizes != SIZES:
                patch.setattr("specray.worker.startup.compiled_sizes", lambda *_: sizes)
            options: dict[str, Any] = {"enable_torch_compile": True, "torch_compile_max_bs": 2}
            torch._dynamo.reset()
            counters.clear()
            self.llm: LLM = make_llm(folder, max_running_requests=8, speculative=speculative, **options)
        model = self.llm._executor.worker.model
        assert isinstance(model, CausalLM)
        assert model.compiled is not None
        assert model.compiled.sizes == sizes
        assert counters["stats"]["unique_graphs"] == len(sizes)
        assert not counters["graph_break"]
        self.num_calls = 0
        run = model.compiled._run

        def counted(*args: Any) -> Any:
            self.num_calls += 1
            with torch.compiler.set_stance("fail_on_recompile"):
                return run(*args)

        model.compiled._run = cast("Any", counted)


@pytest.fixture(scope="module")
def torchs_operations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("aot_eager", SIZES), id="every size, torch's operators"),
        # One size, to which all steps are padded: its C++ takes a quarter of a minute to compile, once on a machine.
        pytest.param(("inductor", [8]), id="one size, compiled", marks=pytest.mark.slow),
    ],
)
def engine(
    request: pytest.FixtureRequest,
    toy: Path,
    tmp_path_factory: pytest.TempPathFactory,
    torchs_operations: None,  # noqa: ARG001
) -> Engine:
    return Engine(toy, METHODS["EAGLE3"](toy, tmp_path_factory.mktemp("head")), *request.param)


@pytest.fixture(scope="module")
def plain(toy: Path, torchs_operations: None) -> dict[str, list[Completion]]:  # noqa: ARG001
    """Without compilation and drafts, one request at a time."""
    cases = {"greedy": GREEDY, "sampled": SAMPLED}
    return {name: generate(toy, PROMPTS, params, max_running_requests=1) for name, params in cases.items()}


@pytest.mark.parametrize(
    ("name", "params", "limit", "batch"),
    [
        ("greedy", GREEDY, UNLIMITED, 8),
        ("sampled", SAMPLED, UNLIMITED, 8),
        ("sampled", SAMPLED, UNLIMITED, 1),
        ("sampled", SAMPLED, DraftLimit(2, 2), 3),
        ("sampled", SAMPLED, DraftLimit(0, 0), 8),
    ],
)
def test_output_does_not_depend_on_compilation_drafts_or_the_batch(
    name: str,
    params: list[SamplingParams],
    limit: DraftLimit,
    batch: int,
    engine: Engine,
    plain: dict[str, list[Completion]],
) -> None:
    before, seen = engine.num_calls, []
    for first in range(0, len(PROMPTS), batch):
        part = slice(first, first + batch)
        limits = [limit] * len(PROMPTS[part])
        seen += engine.llm.generate(
            PROMPTS[part], params[part], draft_limits=limits, cache_salt=f"{name}{limit}{batch}"
        )
    require_equal([each.choices[0] for each in seen], plain[name])
    assert engine.num_calls > before


def test_float32_keeps_its_promise(engine: Engine) -> None:
    assert engine.llm._executor.capacity.has_one_text
