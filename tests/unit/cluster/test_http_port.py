"""The check of Serve's HTTP port, over lists of listeners."""

import pytest

from cluster.http_port import PROXY_TITLE, Listener, refuse_shared_port
from specray.errors import ConfigError

PROXY = Listener("127.0.0.1", 8000, 10, PROXY_TITLE, is_ours=True)
OTHER = Listener("127.0.0.1", 8000, 20, "ray::ProxyActor", is_ours=False)


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
