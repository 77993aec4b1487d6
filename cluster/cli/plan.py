"""The resources that an application reserves in a Ray cluster, as text.

`cluster.engine.placement` computes the bundles.
"""

from collections.abc import Mapping

from cluster.config import AppConfig
from cluster.engine.node_resources import sum_of
from cluster.engine.placement import Bundle, bundles, draft_bundles, strategy
from specray.config import with_values

STRATEGIES = {"STRICT_PACK": "all on one node", "PACK": "on as few nodes as have room"}


def plan_text(config: AppConfig) -> str:
    """The placement plan, one line per bundle. With `device: auto` it assumes a cluster without GPUs."""
    with_gpus = config.device == "cuda"
    engine = bundles(config, with_gpus)
    spread = strategy(config)
    lines = [f"  {_engines(config)}, each a placement group, {STRATEGIES.get(spread, spread)} ({spread}):"]
    lines += [f"    bundle {rank}: {_processes(config, rank)}: {amounts(bundle)}" for rank, bundle in enumerate(engine)]
    num_ingresses = config.server.num_ingress_replicas
    lines.append(f"  {counted(num_ingresses, 'ingress replica')}, anywhere: {amounts(_ingress(config))} each")
    lines.append(f"  total: {amounts(total(config, with_gpus))}")
    if config.device == "auto":
        on_gpus = with_values(config, device="cuda")
        lines.append(f"  total if the cluster has GPUs: {amounts(total(on_gpus, with_gpus=True))}")
    return "\n".join(lines)


def total(config: AppConfig, with_gpus: bool) -> Bundle:
    """All resources reserved at once; with autoscaling, those of the maximum number of engines."""
    engines = bundles(config, with_gpus) * config.max_replicas
    return sum_of([*engines, *[_ingress(config)] * config.server.num_ingress_replicas])


def amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items())


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _engines(config: AppConfig) -> str:
    scaling = config.autoscaling
    most = counted(config.max_replicas, "engine")
    return f"{scaling.min_replicas} to {most}" if scaling.enabled else most


def _processes(config: AppConfig, rank: int) -> str:
    names = ["router"] * (rank == 0) + [f"rank {rank}"] * (rank < config.tp_size)
    names += [f"{config.speculative.drafter_name} drafter"] * (rank in draft_bundles(config))
    return " + ".join(names)


def _ingress(config: AppConfig) -> Bundle:
    return {"CPU": config.server.ingress_cpus}
