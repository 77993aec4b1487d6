"""Where the ranks of a target meet: in a private file on one node, over the network on several.

torch.distributed's traffic is neither encrypted nor authenticated. Between ranks of one node it stays on loopback;
between nodes it needs a private network. Not here: what ranks tell each other (`specray.layers.parallel`).
"""

import os
import socket
import struct
import sys
from pathlib import Path

LOOPBACK = "lo"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: an interface's IPv4 address, in <linux/sockios.h>
_REQUEST = struct.Struct("16s24x")  # struct ifreq: a name, and room for the answer
_FAMILY_AND_PORT = 4  # bytes of the answer's sockaddr_in before its address


def meeting_file(folder: Path) -> str:
    """torch.distributed's address of a file: no port to guess, and nobody without the folder can join."""
    return f"file://{folder}/ranks"


def open_store(address: str) -> tuple[object, str]:
    """A store that listens on this address alone for as long as it is kept, and torch.distributed's name for it.

    Every rank can meet there, that of this process as well.
    """
    # Here, not above: the router imports this module, and torch must stay out of its process.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's reference has it, its stubs do not

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, f"tcp://[{address}]:{port}" if family == socket.AF_INET6 else f"tcp://{address}:{port}"


def use_interface(meeting: str, address: str) -> None:
    """Have this process talk to the other ranks over loopback alone, or over the node's own address between nodes.

    To be called before torch.distributed starts. Between nodes the operator's own choice goes first.
    """
    if meeting.startswith("file://"):
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        return
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this one, not all whose names begin so


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if there is none, or on another system than Linux."""
    if sys.platform != "linux":
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _ipv4_address(name) == address), None)


def _ipv4_address(interface: str) -> str | None:
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_ADDRESS, _REQUEST.pack(interface.encode()))
        except OSError:  # it has none
            return None
    start = 16 + _FAMILY_AND_PORT
    return socket.inet_ntoa(answer[start : start + 4])
