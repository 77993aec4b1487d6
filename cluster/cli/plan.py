"""What an application will ask of a Ray cluster, as text: engines, bundles, fronts and their sum. Starts nothing.

Not here: the bundles themselves (`placement` makes them, for Ray and for this).
"""

from collections.abc import Mapping, Sequence

from cluster.config import AppConfig
from cluster.engine.placement import Bundle, bundles, strategy

STRATEGIES = {"STRICT_PACK": "all on one node", "PACK": "on as few nodes as have room"}


def plan_text(config: AppConfig) -> str:
    """The placement plan, a line for each bundle. With `device: auto` it is what a cluster without GPUs gives."""
    with_gpus = config.device == "cuda"
    engine = bundles(config, with_gpus)
    spread = strategy(config)
    lines = [f"  {_engines(config)}, each a placement group, {STRATEGIES.get(spread, spread)} ({spread}):"]
    lines += [f"    bundle {rank}: {_inside(config, rank)}: {amounts(bundle)}" for rank, bundle in enumerate(engine)]
    fronts = config.server.num_ingress_replicas
    lines.append(f"  {counted(fronts, 'ingress replica')}, anywhere: {amounts(_front(config))} each")
    lines.append(f"  in all: {amounts(total(config, with_gpus))}")
    if config.device == "auto":
        lines.append(f"  in all if the cluster has GPUs: {amounts(total(config, with_gpus=True))}")
    return "\n".join(lines)


def total(config: AppConfig, with_gpus: bool) -> Bundle:
    """Everything reserved at once: with autoscaling, by the most engines there may be."""
    engines = bundles(config, with_gpus) * most_engines(config)
    return _sum([*engines, *[_front(config)] * config.server.num_ingress_replicas])


def amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items())


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _engines(config: AppConfig) -> str:
    scaling = config.autoscaling
    most = counted(most_engines(config), "engine")
    return f"{scaling.min_replicas} to {most}" if scaling.enabled else most


def most_engines(config: AppConfig) -> int:
    """As many as may run at once."""
    return config.autoscaling.max_replicas if config.autoscaling.enabled else config.server.num_replicas


def _inside(config: AppConfig, rank: int) -> str:
    names = [f"rank {rank}"]
    if rank == 0:
        names = ["router", *names, *[f"{config.speculative.algorithm} drafter"] * config.has_draft_actor]
    return " + ".join(names)


def _front(config: AppConfig) -> Bundle:
    return {"CPU": config.server.ingress_cpus}


def _sum(parts: Sequence[Bundle]) -> Bundle:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
