"""When torch.compile is used, for which sizes, and what a machine must have for it."""

import logging
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from specray.caches import private_kernel_cache
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.compiled import MOST_LAYERS, CompiledLayers, group_size
from specray.layers.parallel import RankGroup
from specray.models.registry import load_model
from specray.ops.cpu.library import kernels
from specray.spec_decode.model_files import check_model_files
from specray.worker import startup
from specray.worker.startup import compiled_sizes
from tests.support.engine import make_llm
from tests.support.fake_cuda import fake_cuda
from tests.support.toy import write_toy


@pytest.fixture
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")


@pytest.mark.parametrize(
    ("options", "max_draft_tokens", "sizes"),
    [
        ({"torch_compile_max_bs": 4}, 0, [1, 2, 4]),
        ({"torch_compile_max_bs": 64, "max_running_requests": 2}, 5, [1, 2, 4, 6, 8, 12]),
        ({"max_running_requests": 100}, 0, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_sizes_are_those_of_decode_steps(options: dict[str, Any], max_draft_tokens: int, sizes: list[int]) -> None:
    assert compiled_sizes(EngineConfig(**options), max_draft_tokens) == sizes


def test_a_drafter_that_connects_later_has_the_trees_of_the_configuration() -> None:
    speculative = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="head", num_draft_tokens=6)
    assert compiled_sizes(EngineConfig(torch_compile_max_bs=1, speculative=speculative), 0) == [1, 2, 4, 6]


@pytest.mark.skipif(kernels() is None, reason="needs a C++ compiler")
def test_the_option_changes_nothing_where_the_cpu_kernels_run(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_llm(toy, enable_torch_compile=True) as llm:
        assert llm._executor.worker.model.compiled is None  # type: ignore[attr-defined]
    assert "enable_torch_compile=true changes nothing: the compiled CPU kernels" in caplog.text


@pytest.mark.usefixtures("torchs_operations", "no_compiler")
def test_a_missing_compiler_is_one_error_with_the_fix(toy: Path) -> None:
    config = EngineConfig(model=str(toy), enable_torch_compile=True, device="cpu")
    for start in (startup.start_worker, check_model_files):
        with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and there is none; install g\+\+ or set CXX"):
            start(config)
    check_model_files(config.model_copy(update={"enable_torch_compile": False}))


@pytest.mark.usefixtures("torchs_operations")
def test_missing_headers_of_python_are_an_error_with_the_fix(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    with pytest.raises(ConfigError, match=r"needs /nowhere/Python\.h, which is not there; install Python's headers"):
        check_model_files(EngineConfig(model=str(toy), enable_torch_compile=True, device="cpu"))


def test_layers_are_compiled_before_graphs_are_captured(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a graph contains what was compiled."""
    order: list[str] = []
    monkeypatch.setattr(startup, "compile_target", lambda *_: order.append("compile"))
    monkeypatch.setattr(startup, "make_graphs", lambda *_: order.append("capture"))
    startup.start_worker(EngineConfig(model=str(toy), enable_torch_compile=True, device="cpu", max_total_tokens=512))
    assert order == ["compile", "capture"]


def test_sums_that_depend_on_the_batch_exclude_the_promise_of_deterministic() -> None:
    with pytest.raises(ValidationError, match="deterministic=true excludes enable_torch_compile=true"):
        EngineConfig(deterministic=True, enable_torch_compile=True)


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_compiled_code_is_not_read_from_a_folder_that_others_can_write(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRAY_KERNEL_CACHE", str(tmp_path))
    folder = private_kernel_cache("inductor")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="holds compiled code, but other users can change it"):
        private_kernel_cache("inductor")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNEL_CACHE", str(tmp_path))
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="other users can change it"):
        private_kernel_cache("inductor")


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])  # without and with biases; with norms of q and k
def test_on_a_gpu_layers_are_one_graph_in_which_attention_is_opaque(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as fake tensors show it: nothing is computed, and Inductor's kernels are not made."""
    pytest.importorskip("triton")
    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *_, **__: None)
    gpu, functional = torch.device("cuda", 0), []

    def record(graph: GraphModule, inputs: list[Tensor]) -> Any:  # noqa: ARG001
        functional.append(graph)
        return graph.forward

    config = EngineConfig(model=str(write_toy(tmp_path, variant)), dtype="bfloat16", device="cuda")
    counters.clear()
    with fake_cuda():
        model = load_model(tmp_path, config, RankGroup(), gpu, progress=False)
        tokens = torch.zeros(1, dtype=torch.int64, device=gpu)
        inputs = (model.embedding(tokens), *model.rotary.at(tokens))
    compiled = CompiledLayers(list(model.layers), 4, [1], backend=aot_autograd(fw_compiler=record))
    with torch.inference_mode():
        compiled.compile(*inputs, is_fused=True, progress=False)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    [graph] = functional
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert {str(node.meta["val"].device) for node in nodes if isinstance(node.meta.get("val"), Tensor)} == {"cuda:0"}
    names = [str(node.target) + str(node.args[:1]) for node in nodes]
    assert sum("specray.attend_rotated" in name for name in names) == len(model.layers)
    assert not any("index_put" in name or "scaled_dot_product" in name for name in names)


@pytest.mark.parametrize(("num_layers", "size"), [(30, 6), (32, 8), (28, 7), (80, 8), (61, 8), (2, 8)])
def test_groups_have_equally_many_layers_where_that_is_possible(num_layers: int, size: int) -> None:
    assert group_size(num_layers) == size
    assert size <= MOST_LAYERS


def test_a_step_with_fewer_tokens_is_padded_and_its_layers_see_only_them() -> None:
    """Three layers of a group of eight; each adds its attention's result."""
    layer = _Adding()
    compiled = CompiledLayers([layer, layer, layer], 1, [2, 4], backend="eager")
    hidden, part = torch.arange(6.0).view(3, 2), torch.zeros(3, 1, 2)
    seen: list[tuple[int, int]] = []

    def attend(index: int, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        seen.append((index, len(q)))
        return q.flatten(1) + index

    streams = list(compiled(hidden, part, part, attend))
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert torch.equal(torch.stack(streams), torch.stack([hidden, 2 * hidden, 4 * hidden + 1, 8 * hidden + 4]))
    assert [compiled.takes(count) for count in (0, 1, 4, 5)] == [False, True, True, False]


class _Adding(nn.Module):
    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:  # noqa: ARG002
        return hidden + attend(0, hidden[:, None], hidden[:, None])  # type: ignore[no-any-return]
