"""When torch.compile is used, for which sizes, and what a machine must have for it."""

import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specray.caches import private_kernel_cache
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.ops.cpu.library import kernels
from specray.spec_decode.model_files import check_model_files
from specray.worker import worker as worker_module
from specray.worker.compilation import compiled_sizes
from specray.worker.worker import Worker
from tests.support.engine import make_llm


@pytest.fixture
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


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
    assert compiled_sizes(EngineConfig(torch_compile_max_bs=1, speculative=speculative), 0) == [1, 4, 6]


@pytest.mark.skipif(kernels() is None, reason="needs a C++ compiler")
def test_the_option_changes_nothing_where_the_cpu_kernels_run(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_llm(toy, enable_torch_compile=True) as llm:
        assert llm._executor.worker.model.compiled is None  # type: ignore[attr-defined]
    assert "enable_torch_compile=true changes nothing: the compiled CPU kernels" in caplog.text


@pytest.mark.usefixtures("torchs_operations", "no_compiler")
def test_a_missing_compiler_is_one_error_with_the_fix(toy: Path) -> None:
    config = EngineConfig(model=str(toy), enable_torch_compile=True, device="cpu")
    for start in (Worker, check_model_files):
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
    monkeypatch.setattr(worker_module, "compile_target", lambda *_: order.append("compile"))
    monkeypatch.setattr(Worker, "_capture", lambda *_: order.append("capture"))
    Worker(EngineConfig(model=str(toy), enable_torch_compile=True, device="cpu", max_total_tokens=512))
    assert order == ["compile", "capture"]


def test_sums_that_depend_on_the_batch_exclude_the_promise_of_deterministic() -> None:
    with pytest.raises(ConfigError, match="deterministic=true excludes enable_torch_compile=true"):
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
