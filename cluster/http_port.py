"""A check that Serve's HTTP proxy has its port for itself, made before an application starts.

Serve sets SO_REUSEPORT, so a second Serve of the same user silently shares the port of the first: each gets some of the
requests. Only a port of another kind of server makes `serve run` fail by itself.
`specray serve` also checks the port before it starts Ray (`specray.cli.local_server.refuse_port_in_use`).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil
import ray

from specray.errors import ConfigError

PROXY_TITLE = "ray::ProxyActor"
WILDCARDS = ("0.0.0.0", "::")


class Listener(NamedTuple):
    """A process that listens on a TCP port."""

    address: str
    port: int
    pid: int
    title: str
    is_ours: bool  # a worker of this Ray cluster


def check_http_port() -> None:
    """ConfigError if a proxy of this Serve shares its port with another server on this machine."""
    if ray.is_initialized():  # an import path given to `serve run` is built before Ray starts
        refuse_shared_port(list(listeners(ray.get_runtime_context().gcs_address)))


def refuse_shared_port(found: Iterable[Listener]) -> None:
    """ConfigError if a proxy of this cluster listens on the port of a process that is not of this cluster."""
    found = list(found)
    for proxy in found:
        if not (proxy.is_ours and proxy.title.startswith(PROXY_TITLE)):
            continue
        for other in found:
            if other.port == proxy.port and not other.is_ours and _overlap(other.address, proxy.address):
                raise ConfigError(
                    f"http_options.port={proxy.port} is already used by process {other.pid} ({other.title}), which "
                    "would get some of the requests; stop it, or set another port"
                )


def listeners(gcs_address: str) -> Iterator[Listener]:
    """The processes of this machine that listen on TCP ports, as far as this user may see them."""
    is_ours: dict[int, bool] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.pid is None:
            continue
        with suppress(psutil.Error):  # it has ended, or is another user's
            process = psutil.Process(connection.pid)
            if connection.pid not in is_ours:
                is_ours[connection.pid] = _is_worker(process, gcs_address)
            title = " ".join(" ".join(process.cmdline()).split())[:80]
            yield Listener(connection.laddr.ip, connection.laddr.port, connection.pid, title, is_ours[connection.pid])


def _is_worker(process: psutil.Process, gcs_address: str) -> bool:
    """Whether a raylet of the cluster at this address started the process."""
    parent = process.parent()
    return parent is not None and any(gcs_address in argument for argument in parent.cmdline())


def _overlap(one: str, other: str) -> bool:
    return one == other or one in WILDCARDS or other in WILDCARDS
