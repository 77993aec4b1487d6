"""Checks that the nodes of a Ray cluster have the resources that applications reserve.

Ray itself waits for nodes that may be added later, also where none will be. Resources in use count, because they may
become free.
"""

from collections.abc import Mapping, Sequence

import psutil
import ray

from cluster.config import AppConfig
from cluster.engine.placement import Bundle, bundles, decide_device, strategy, uses_gpus
from specray.errors import ConfigError

SLACK = 1e-4  # Ray counts in units of this size
# Resource -> how to need less of it, or provide more.
REMEDIES = {
    "GPU": "set device: cpu, lower tp_size, or make the GPUs visible to Ray (nvidia-smi lists them)",
    "CPU": "lower server.rank_cpus, router_cpus, ingress_cpus, draft.cpus, num_replicas or tp_size",
}
OTHER = "start nodes with it (`ray start --resources`), or change placement.rank_resources"


def check_node_resources(apps: Sequence[AppConfig]) -> None:
    """ConfigError if the cluster, which does not grow, cannot have the resources of all applications together."""
    if ray.is_initialized() and not may_grow(ray.get_runtime_context().gcs_address):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        refuse_impossible(apps, nodes, [uses_gpus(decide_device(app)) for app in apps])


def refuse_impossible(
    apps: Sequence[AppConfig], nodes: Sequence[Mapping[str, float]], with_gpus: Sequence[bool]
) -> None:
    """ConfigError if an engine fits on no node, or all engines and ingresses together exceed the nodes' total."""
    wanted: list[Bundle] = []
    for app, has_gpus in zip(apps, with_gpus, strict=True):
        engine = bundles(app, has_gpus)
        parts = [sum_of(engine)] if strategy(app) == "STRICT_PACK" else engine
        for part in parts:
            _refuse_if_no_node_has(part, nodes, "an engine" if len(parts) == 1 else "a rank")
        num_engines = app.autoscaling.min_replicas if app.autoscaling.enabled else app.server.num_replicas
        wanted += engine * num_engines
        wanted += [{"CPU": app.server.ingress_cpus}] * app.server.num_ingress_replicas
    have = sum_of(nodes)
    for name, amount in sum_of(wanted).items():
        if amount > have.get(name, 0.0) + SLACK:
            raise _error(f"all engines and ingresses together need {amount:g} {name}", have.get(name, 0.0), name)


def may_grow(gcs_address: str) -> bool:
    """Whether nodes may be added. False only if the cluster's monitor runs here, without autoscaling."""
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if "autoscaler" in command and "monitor.py" in command and f"--gcs-address={gcs_address}" in command:
            return "--autoscaling-config" in command
    return True


def sum_of(parts: Sequence[Mapping[str, float]]) -> Bundle:
    """The sum of resources."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _refuse_if_no_node_has(part: Bundle, nodes: Sequence[Mapping[str, float]], what: str) -> None:
    for name, amount in part.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if amount > most + SLACK:
            raise _error(f"{what} needs {amount:g} {name} on one node", most, name)


def _error(need: str, have: float, name: str) -> ConfigError:
    return ConfigError(f"{need}, and there are {have:g}; {REMEDIES.get(name, OTHER)}")
