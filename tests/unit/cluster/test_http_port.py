"""The check of Serve's HTTP port, over scripted states of proxies and lists of listeners."""

import pytest
from ray.serve.schema import ProxyStatus

from cluster.http_port import PROXY_TITLE, START_S, Listener, refuse_shared_port, wait_until_healthy
from specray.errors import ConfigError

PROXY = Listener("127.0.0.1", 8000, 10, PROXY_TITLE, is_ours=True)
OTHER = Listener("127.0.0.1", 8000, 20, "ray::ProxyActor", is_ours=False)


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_proxy_that_cannot_bind_its_port_is_an_error() -> None:
    clock = Clock()
    with pytest.raises(ConfigError, match="another process probably uses the port in http_options"):
        wait_until_healthy(lambda: [ProxyStatus.STARTING], clock.read, clock.sleep)
    assert START_S <= clock.now < START_S + 1.0


def test_one_healthy_proxy_is_enough() -> None:
    clock = Clock()
    states = iter([[ProxyStatus.STARTING] * 2, [ProxyStatus.STARTING, ProxyStatus.HEALTHY]])
    wait_until_healthy(lambda: next(states), clock.read, clock.sleep)


def test_no_proxy_is_waited_for_where_there_is_none() -> None:
    clock = Clock()
    wait_until_healthy(list, clock.read, clock.sleep)
    assert clock.now == 0.0


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_shared_with_another_server_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"http_options.port=8000 is already used by process 20 \(ray::ProxyActor\)"):
        refuse_shared_port([PROXY, OTHER._replace(address=address)])


@pytest.mark.parametrize(
    "other",
    [
        OTHER._replace(port=8001),
        OTHER._replace(address="10.0.0.1"),
        OTHER._replace(is_ours=True),  # the proxy of another node of this cluster on the same machine
    ],
)
def test_other_listeners_are_no_error(other: Listener) -> None:
    refuse_shared_port([PROXY, other])
    refuse_shared_port([PROXY._replace(title="ray::ServeReplica"), OTHER])
