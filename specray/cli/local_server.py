"""Addresses and ports of a server on this machine."""

import random
import socket
from contextlib import suppress
from urllib.request import ProxyHandler, build_opener

from specray.errors import SpecRayError

CHOSEN_PORTS = (20_000, 30_000)
OPENER = build_opener(ProxyHandler({}))  # no proxy from the environment: the server is local, as a rule


def free_port() -> int:
    """An unused TCP port on loopback, below the ephemeral range: Ray's processes take ports from that."""
    while True:
        port = random.SystemRandom().randrange(*CHOSEN_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerStartError(SpecRayError):
    """The server could not be started; the message ends with its log."""


def refuse_port_in_use(host: str, port: int) -> None:
    """ServerStartError if the port cannot be bound, by IPv4 or IPv6."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], port, *address[2:]))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerStartError(
            f"cannot listen on {host}:{port} ({reason}); stop the process that uses it, or choose another --host or "
            "--port"
        ) from None


def reachable(host: str) -> str:
    """A host for URLs by which a server that listens on `host` can be reached from this machine."""
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return wildcards.get(host, f"[{host}]" if ":" in host else host)
