"""What CUDA graphs cannot have is said once, with the reason and the fix, and runs without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.moe import EXPERTS_READ
from specray.worker.graph_backend import GraphBackend
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.startup import WALKS, start_worker
from tests.support.architectures import write_architecture
from tests.support.fake_ipc import fake_ipc
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs
from tests.support.methods import METHODS


@pytest.fixture(autouse=True)
def graphs() -> Iterator[list[RecordedGraphs]]:
    with recorded_graphs() as graphs:
        yield graphs


def config_of(target: Path, **options: object) -> EngineConfig:
    sizes = {"max_total_tokens": 256, "max_running_requests": 1, "num_threads": 1}
    return EngineConfig.model_validate({"model": str(target), "device": "cpu", "dtype": "float32"} | sizes | options)


def test_a_target_whose_experts_are_chosen_on_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_architecture("qwen3-moe", tmp_path)
    worker = start_worker(config_of(tmp_path))
    assert not isinstance(worker.backend, GraphBackend)
    assert worker.capacity.without_graphs == (f"decode steps: {EXPERTS_READ}",)
    assert "moe_runner_backend: triton" in caplog.text


def test_a_drafter_whose_experts_are_chosen_on_the_host(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    worker = start_worker(config_of(toy, speculative=METHODS["MTP-deepseek"](toy, tmp_path)))
    assert worker.capacity.without_graphs == (f"drafts: {EXPERTS_READ}",)
    worker.prepare()
    assert {kind for kind, *_ in graphs[0].captured} == {"forward", "verify"}


def test_a_dense_engine_has_all_graphs(toy: Path, tmp_path: Path) -> None:
    for name in ("EAGLE3", "MTP-stack", "STANDALONE", "PARALLEL"):
        folder = tmp_path / name
        folder.mkdir()
        worker = start_worker(config_of(toy, speculative=METHODS[name](toy, folder)))
        assert worker.capacity.without_graphs == ()


def test_several_drafters_have_graphs_of_their_own(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_worker(config_of(toy, speculative=METHODS["SEVERAL"](toy, tmp_path)))
    assert worker.capacity.without_graphs == ("drafts of lookup: n-grams are looked up on the host",)
    assert "drafts of lookup: n-grams" in caplog.text
    drafts = [key for key in graphs[0].captured if key[0] == "draft"]  # type: ignore[index]
    assert {name for *_, name in drafts} == {"head", "layers"}


def test_what_is_done_on_the_host(toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]) -> None:
    worker = start_worker(config_of(toy, speculative=METHODS["NGRAM"](toy, tmp_path)))
    assert worker.capacity.without_graphs == ("drafts: n-grams are looked up on the host",)
    rejection = METHODS["EAGLE3"](toy, tmp_path).model_copy(update={"verification": "rejection"})
    worker = start_worker(config_of(toy, speculative=rejection))
    assert worker.capacity.without_graphs == (f"verification and drafts: {WALKS}",)
    worker.prepare()
    assert {kind for kind, *_ in graphs[1].captured} == {"forward", "verify"}


def test_drafts_in_device_memory_need_graphs_for_a_budget_that_learns(toy: Path, tmp_path: Path) -> None:
    """A configuration that asks for graphs may get none."""
    write_architecture("qwen3-moe", tmp_path)
    speculative = METHODS["NGRAM"](toy, tmp_path).model_copy(update={"budget": "auto"})
    endpoint = DraftEndpoint(str(tmp_path / "drafts"), 1, uses_cuda_ipc=True)
    with fake_ipc(), pytest.raises(ConfigError, match=r"experts.*budget: static, or cuda_ipc: false"):
        start_worker(config_of(tmp_path, speculative=speculative), colocate=endpoint)
