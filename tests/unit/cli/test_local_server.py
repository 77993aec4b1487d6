"""Ports and hosts of a server on this machine."""

import socket

import pytest

from specray.cli.local_server import ServerStartError, free_port, reachable, refuse_port_in_use


@pytest.mark.parametrize("host", ["::1", "::", "127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_is_free_or_in_use_by_either_version_of_ip(host: str) -> None:
    port = free_port()
    refuse_port_in_use(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    refused = pytest.raises(ServerStartError, match=rf"cannot listen on {host}:{port} \(Address already in use\)")
    with socket.create_server((host, port), family=family), refused:
        refuse_port_in_use(host, port)


@pytest.mark.parametrize(("host", "url"), [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("a", "a")])
def test_a_server_has_a_url(host: str, url: str) -> None:
    assert reachable(host) == url
