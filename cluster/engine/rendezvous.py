"""The rendezvous of a target's ranks for torch.distributed: a private file on one node, a TCP store on several.

torch.distributed's traffic is neither encrypted nor authenticated. It stays on loopback between ranks of one node, and
needs a private network between nodes.
"""

import os
import socket
import sys
from pathlib import Path

import psutil

LOOPBACK = "lo"


def file_rendezvous(path: Path) -> str:
    """The init method for ranks of one node, by a new file. Only processes with access to its folder can join."""
    return f"file://{path}"


def open_store(address: str) -> tuple[object, str]:
    """A store that listens only on `address` until it is deleted, and its init method for all ranks."""
    # The router imports this module and must not load torch.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, f"tcp://[{address}]:{port}" if family == socket.AF_INET6 else f"tcp://{address}:{port}"


def use_interface(init_method: str, address: str) -> None:
    """Restrict torch.distributed in this process to loopback, or between nodes to the interface with `address`.

    Call it before torch.distributed is initialized. Between nodes, variables set by the operator take precedence.
    On one node NCCL moves data through the devices or shared memory, and needs sockets only to meet.
    """
    if init_method.startswith("file://"):
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
            os.environ["NCCL_SOCKET_IFNAME"] = f"={LOOPBACK}"  # NCCL reads a plain name as a prefix
        return
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_of(address: str) -> str | None:
    """The network interface with this address, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == address for a in addresses)), None)
