"""Engines on GPUs that only Ray believes to be there: bundles, ordinals, shares, and the error if there are too few."""

import os
from typing import Any

import pytest
import ray

from cluster.config import AppConfig
from cluster.engine.executor import RayExecutor
from cluster.engine.node_resources import check_node_resources
from cluster.engine.placement import Placement, decide_device, draft_bundles, draft_resources, rank_resources
from cluster.liveness.actors import see_own_gpus
from specray.errors import ConfigError
from tests.cluster.conftest import NUM_GPUS

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
    executor = object.__new__(RayExecutor)
    executor._placement = Placement(config, with_gpus=True)
    wanted = [(rank_resources(config, True, rank), rank) for rank in range(config.tp_size)]
    wanted += [(draft_resources(config, True), bundle) for bundle in draft_bundles(config)]
    actors = []
    try:
        for resources, bundle in wanted:
            options = executor._options(config, resources, bundle)
            options["runtime_env"]["env_vars"] |= environment
            actors.append(ray.remote(SeeingActor).options(**options).remote())
        seen = ray.get([actor.seen.remote() for actor in actors], timeout=120)
    finally:
        for actor in actors:
            ray.kill(actor)
        executor._placement.release()
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
