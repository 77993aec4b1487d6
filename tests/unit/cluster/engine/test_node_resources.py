"""Resources that no node has are refused, over lists of nodes."""

import re
from typing import Any

import psutil
import pytest

from cluster.config import AppConfig
from cluster.engine.node_resources import may_grow, refuse_impossible
from specray.errors import ConfigError

SMALL, GPUS = {"CPU": 2.0, "memory": 1e9}, {"CPU": 64.0, "GPU": 2.0}
MONITOR = ["python", "-u", "ray/autoscaler/_private/monitor.py", "--gcs-address=127.0.0.1:1"]


def app(**options: Any) -> AppConfig:
    return AppConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "nodes", "message"),
    [
        ({"device": "cuda"}, [SMALL], "an engine needs 1 GPU on one node, and there are 0;"),
        (
            {"device": "cuda", "tp_size": 4},
            [GPUS, GPUS],
            "an engine needs 4 GPU on one node, and there are 2",
        ),
        ({"server": {"rank_cpus": 64}}, [SMALL], "an engine needs 64.1 CPU on one node, and there are 2"),
        ({"server": {"num_replicas": 20}}, [SMALL], "all engines and ingresses together need 4.1 CPU"),
        ({"server": {"num_ingress_replicas": 30}}, [SMALL], "all engines and ingresses together need 3.2 CPU"),
        ({"placement": {"rank_resources": {"rack": 1}}}, [SMALL], "1 rack on one node.*placement.rank_resources"),
    ],
)
def test_what_no_node_can_have_is_an_error(options: dict[str, Any], nodes: Any, message: str) -> None:
    config = app(**options)
    with pytest.raises(ConfigError, match=message):
        refuse_impossible([config], nodes, [config.device == "cuda"])


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({}, [SMALL]),
        ({"device": "cuda", "tp_size": 2}, [SMALL, GPUS]),
        ({"device": "cuda", "tp_size": 4, "placement": {"across_nodes": True}}, [GPUS, GPUS]),
        ({"server": {"rank_cpus": 1.8}}, [SMALL]),  # a sum of exactly 2, but for rounding
        ({"autoscaling": {"enabled": True, "max_replicas": 50}}, [SMALL]),
    ],
)
def test_what_some_node_can_have_is_none(options: dict[str, Any], nodes: Any) -> None:
    config = app(**options)
    refuse_impossible([config], nodes, [config.device == "cuda"])


def test_applications_are_counted_together() -> None:
    half = app(server={"rank_cpus": 1.2})
    refuse_impossible([half], [SMALL], [False])
    with pytest.raises(ConfigError, match=re.escape("all engines and ingresses together need 2.8 CPU")):
        refuse_impossible([half, half], [SMALL], [False, False])


@pytest.mark.parametrize(
    ("command", "grows"),
    [
        (MONITOR, False),
        ([*MONITOR, "--autoscaling-config=a.yaml"], True),
        ([*MONITOR[:-1], "--gcs-address=127.0.0.1:2"], True),  # another cluster's: this one's is elsewhere
        (["python"], True),
    ],
)
def test_a_cluster_grows_unless_its_monitor_only_watches(
    command: list[str], grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = type("Process", (), {"info": {"cmdline": command}})
    monkeypatch.setattr(psutil, "process_iter", lambda _: [process])
    assert may_grow("127.0.0.1:1") is grows
