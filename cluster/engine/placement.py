"""Resources and placement of an engine's processes.

An engine has one placement group with one bundle per rank. Bundle 0 also holds the router. Each holds an actor that
drafts with a part of a draft model; a drafter without a model is in bundle 0. One with a GPU of its own
(`draft.placement: separate`) has another bundle behind those of the ranks.
"""

import logging

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import AppConfig
from specray.config import with_values
from specray.errors import EngineDeadError

PLACEMENT_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)

Bundle = dict[str, float]


def bundles(config: AppConfig, with_gpus: bool) -> list[Bundle]:
    """The bundle of each rank, in order, and that of a separate drafter."""
    cpus = {"CPU": config.server.rank_cpus}
    rank = (cpus | {"GPU": 1.0} if with_gpus else cpus) | config.placement.rank_resources
    ranks = [dict(rank) for _ in range(config.tp_size)]
    ranks[0]["CPU"] += config.server.router_cpus
    if not config.has_draft_gpu:
        for index in draft_bundles(config):
            ranks[index]["CPU"] += config.draft.cpus
        return ranks
    own = {"CPU": config.draft.cpus}
    return [*ranks, own | {"GPU": 1.0} if with_gpus else own]


def draft_bundles(config: AppConfig) -> list[int]:
    """The index of the bundle of each actor that drafts."""
    if not config.has_draft_actor:
        return []
    if config.has_draft_gpu:
        return [config.tp_size]
    return list(range(config.tp_size if config.replaces_drafters else config.draft_ranks(config.speculative)))


def strategy(config: AppConfig) -> str:
    """Ray's placement strategy: all bundles on one node, or on as few nodes as possible."""
    return "PACK" if config.placement.across_nodes else "STRICT_PACK"


def rank_resources(config: AppConfig, with_gpus: bool, rank: int) -> Bundle:
    """Resources of one rank: CPUs and a GPU, without the share of the drafter beside it."""
    cpus = {"CPU": config.server.rank_cpus}
    share = config.draft.gpu_share if rank in draft_bundles(config) else 0.0
    return cpus | {"GPU": 1.0 - share} if with_gpus else cpus


def draft_resources(config: AppConfig, with_gpus: bool) -> Bundle:
    """Resources of one actor that drafts; half of its share, or of its GPU, if its successor loads beside it."""
    half = 0.5 if config.replaces_drafters else 1.0
    cpus = {"CPU": config.draft.cpus * half}
    share = 1.0 if config.has_draft_gpu else config.draft.gpu_share
    return cpus | {"GPU": share * half} if with_gpus else cpus


def decide_device(config: AppConfig) -> AppConfig:
    """The configuration with GPUs instead of `device: auto` if the cluster has any, and with CPUs otherwise.

    So is `draft.placement: auto`, which depends on the device. Both are decided once, for the bundles, the router and
    the ranks: a rank without a bundle's GPU would see all of them.
    """
    if config.device == "auto":
        has_gpus = ray.is_initialized() and _cluster_gpus() > 0
        config = with_values(config, device="cuda" if has_gpus else "cpu")
    if config.draft.placement != "auto":
        return config
    decided = config.draft_placement
    if config.speculative.has_drafter:
        logger.info(
            "draft.placement: auto is %s (device: %s, server.admin_key_file: %s, draft.cuda_ipc: %s)",
            decided,
            config.device,
            "set" if config.server.admin_key_file is not None else "none",
            config.draft.cuda_ipc,
        )
    return with_values(config, draft=with_values(config.draft, placement=decided))


def uses_gpus(config: AppConfig) -> bool:
    """Whether each rank gets a GPU."""
    assert config.device != "auto", "see `decide_device`"
    return config.device == "cuda"


class Placement:
    """The placement group of this process, or a new one that `release` removes."""

    def __init__(self, config: AppConfig, with_gpus: bool) -> None:
        current = ray.util.get_current_placement_group()
        self._is_ours = current is None
        self.group: PlacementGroup = current or _new_group(bundles(config, with_gpus), strategy(config))

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy of an actor in a bundle."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)

    def release(self) -> None:
        if self._is_ours:
            remove_placement_group(self.group)


def _cluster_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def _new_group(wanted: list[Bundle], spread: str) -> PlacementGroup:
    group: PlacementGroup = placement_group(wanted, strategy=spread)
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise EngineDeadError(
            f"the cluster could not place the bundles {wanted} ({spread}) within {PLACEMENT_TIMEOUT_S:g} s; free "
            "resources, lower server.rank_cpus or tp_size, or set placement.across_nodes if one node is too small"
        )
    return group
