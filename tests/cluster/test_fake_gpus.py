"""Engines on GPUs that only Ray believes to be there: bundles, ordinals, shares, and the error if there are too few."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.config import AppConfig
from cluster.engine import executor, mps
from cluster.engine.executor import RayExecutor
from cluster.engine.node_resources import check_node_resources
from cluster.engine.placement import Placement, decide_device, draft_bundles, draft_resources, rank_resources
from cluster.liveness.actors import see_own_gpus
from specray.config import with_values
from specray.errors import ConfigError
from tests.cluster.conftest import NUM_GPUS
from tests.support.fake_mps import SERVER, UUIDS, FakeMps, has_ended

ALL = ",".join(map(str, range(NUM_GPUS)))
# Without this variable Ray hides the other GPUs itself.
NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ALL}
OPTIONS: dict[str, Any] = {
    "tp_size": NUM_GPUS,
    "speculative": {"algorithm": "EAGLE3", "draft_model_path": "head"},
    "draft": {"placement": "colocated", "gpu_share": 0.25, "cpus": 0.05},
    "server": {"rank_cpus": 0.05, "router_cpus": 0.05},
}


class SeeingActor:
    """Sees the GPUs that a rank or draft actor in its place would see."""

    def __init__(self) -> None:
        see_own_gpus()

    def seen(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("environment", [{}, NOSET], ids=["hidden", "noset"])
@pytest.mark.usefixtures("ray_cluster")
def test_each_rank_has_a_gpu_and_shares_it_with_the_draft_actor_beside_it(environment: dict[str, str]) -> None:
    config = decide_device(AppConfig.model_validate(OPTIONS))
    assert config.device == "cuda"
    engine = object.__new__(RayExecutor)
    engine._placement, engine._mps_pipes = Placement(config, with_gpus=True), None
    wanted = [(rank_resources(config, True, rank), rank) for rank in range(config.tp_size)]
    wanted += [(draft_resources(config, True), bundle) for bundle in draft_bundles(config)]
    actors = []
    try:
        for resources, bundle in wanted:
            options = engine._options(config, resources, bundle)
            options["runtime_env"]["env_vars"] |= environment
            actors.append(ray.remote(SeeingActor).options(**options).remote())
        seen = ray.get([actor.seen.remote() for actor in actors], timeout=120)
    finally:
        for actor in actors:
            ray.kill(actor)
        engine._placement.release()
    ranks, drafters = seen[: config.tp_size], seen[config.tp_size :]
    assert sorted(ranks) == ALL.split(",")
    assert drafters == ranks


@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_with_more_gpus_than_there_are_is_one_error() -> None:
    config = AppConfig(device="cuda", tp_size=NUM_GPUS + 1)
    with pytest.raises(
        ConfigError, match=f"needs {NUM_GPUS + 1} GPU on one node, and there are {NUM_GPUS}; set device"
    ):
        check_node_resources([config])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """The processes are those of an engine on GPUs, which compute on the CPU."""
    fake, environment_of, config_of = FakeMps(tmp_path / "bin"), executor.rank_environment, executor._rank_config

    def environment(config: AppConfig, has_gpu: bool) -> dict[str, str]:
        return environment_of(config, has_gpu) | {"PATH": fake.path}

    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setattr(executor, "rank_environment", environment)
    monkeypatch.setattr(executor, "_rank_config", lambda config: with_values(config_of(config), device="cpu"))
    return fake


def config_of_one(model: Path, **draft: object) -> AppConfig:
    options = {"tp_size": 1, "model": str(model), "device": "cuda", "speculative": {"algorithm": "NGRAM"}}
    return AppConfig.model_validate(OPTIONS | options | {"draft": OPTIONS["draft"] | draft})


@pytest.mark.parametrize(
    ("draft", "reason", "pipes"),
    [
        ({"cuda_ipc": True}, "nvidia-cuda-mps-control has not started", "/mps"),
        ({"mps": "off"}, "draft.mps: off", "/dev/null"),
    ],
    ids=["broken", "off"],
)
@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_without_mps_exchanges_trees_by_its_socket(
    draft: dict[str, object], reason: str, pipes: str, fake: FakeMps, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waited for trees on the GPU would hold it; on this CPU it would refuse its drafter."""
    monkeypatch.setattr(mps, "START_TIMEOUT_S", 0.2)
    (fake.folder / "broken").touch()
    engine = RayExecutor(config_of_one(tiny_model, **draft))
    try:
        assert (engine.mps, engine.capacity.max_draft_tokens > 0) == (reason, True)
        folders = [each.environ().get("CUDA_MPS_PIPE_DIRECTORY", "") for each in ray_processes()]
        assert sum(folder.endswith(pipes) for folder in folders) == 2
    finally:
        engine.stop()
    assert fake.commands == []


@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_computes_with_an_mps_daemon_that_ends_last(fake: FakeMps, tiny_model: Path) -> None:
    engine = RayExecutor(config_of_one(tiny_model))
    try:
        assert (engine.mps, engine.capacity.max_draft_tokens > 0) == ("on", True)
        daemon, seen = fake.daemon(), fake.environment
        assert seen["CUDA_VISIBLE_DEVICES"] in UUIDS
        uses = {process.pid: process.environ().get("CUDA_MPS_PIPE_DIRECTORY") for process in ray_processes()}
        computing = [pid for pid, folder in uses.items() if folder == seen["CUDA_MPS_PIPE_DIRECTORY"]]
        assert len(computing) == 2
        assert daemon.is_running()
    finally:
        engine.stop()
    assert has_ended(daemon)
    *_, servers, terminate, end = fake.commands
    assert (servers, end) == ("get_server_list", "quit -t 5")
    assert terminate in [f"terminate_client {SERVER} {pid}" for pid in computing]


def ray_processes() -> list[psutil.Process]:
    """The actors of this user's engines."""
    names = ("ray::TargetActor", "ray::DraftActor")
    return [each for each in psutil.process_iter(["cmdline"]) if " ".join(each.info["cmdline"] or ()).startswith(names)]
