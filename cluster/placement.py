"""Where an engine's processes go: bundles as a pure function of the configuration, then the Ray adapter.

One placement group per engine on one node; the router shares bundle 0 with rank 0. Not here: which
replica serves a request.
"""

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import AppConfig
from specray.errors import EngineDeadError

STRATEGY = "STRICT_PACK"  # ranks meet in one folder and over loopback
PLACEMENT_TIMEOUT_S = 60.0

Bundle = dict[str, float]


def bundles(config: AppConfig, with_gpus: bool) -> list[Bundle]:
    """Resources of each rank in order, with its GPU and its drafter; bundle 0 holds the router, too."""
    parts = [rank_resources(config, with_gpus)]
    if config.has_draft_actor:
        parts.append(draft_resources(config, with_gpus))
    rank = {name: sum(part[name] for part in parts) for name in parts[0]}
    first = rank | {"CPU": rank["CPU"] + config.server.router_cpus}
    return [first, *(dict(rank) for _ in range(config.tp_size - 1))]


def rank_resources(config: AppConfig, with_gpus: bool) -> Bundle:
    """What one rank reserves: a GPU, but for its drafter's share."""
    cpus = {"CPU": config.server.rank_cpus}
    return cpus | {"GPU": 1.0 - config.draft.gpu_share * config.has_draft_actor} if with_gpus else cpus


def draft_resources(config: AppConfig, with_gpus: bool) -> Bundle:
    """What a drafter reserves in its rank's bundle."""
    cpus = {"CPU": config.draft.cpus}
    return cpus | {"GPU": config.draft.gpu_share} if with_gpus else cpus


def uses_gpus(config: AppConfig) -> bool:
    """Whether ranks get a GPU each; `auto` takes GPUs if the cluster has any."""
    if config.device == "auto":
        return ray.is_initialized() and _cluster_gpus() > 0
    return config.device == "cuda"


class Placement:
    """The placement group this process runs in, or a new one that `release` removes."""

    def __init__(self, config: AppConfig, with_gpus: bool) -> None:
        current = ray.util.get_current_placement_group()
        self._is_ours = current is None
        self.group: PlacementGroup = current or _new_group(bundles(config, with_gpus))

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)

    def release(self) -> None:
        if self._is_ours:
            remove_placement_group(self.group)


def _cluster_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def _new_group(wanted: list[Bundle]) -> PlacementGroup:
    group: PlacementGroup = placement_group(wanted, strategy=STRATEGY)
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise EngineDeadError(
            f"no node of the cluster has room for the bundles {wanted} within {PLACEMENT_TIMEOUT_S:g} s; "
            "free resources, lower server.rank_cpus or tp_size"
        )
    return group
