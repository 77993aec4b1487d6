"""The handshake between a target rank and drafters in other processes, over a unix socket.

A drafter connects, describes itself and replaces the drafter before it. `dismiss` connects to remove the drafter. This
module does not import torch, because the router's process imports it. `wire` has the messages after the handshake.
"""

import contextlib
import os
import socket
import struct
from typing import Annotated, Literal, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter

from specray.channel import Channel, ChannelClosedError
from specray.config import MAX_TREE_NODES

MAX_LAYERS = 16  # whose hidden states a drafter reads
_CREDENTIALS = struct.Struct("=3i")  # Linux's struct ucred: process, user, group


# Where the drafter computes: in the rank's process, in its own on rank 0's GPU, in its own on another GPU of the node.
DraftPlacement = Literal["inline", "colocated", "separate"]


class DraftEndpoint(NamedTuple):
    """A unix socket in a private folder, and the epoch of the engine that connecting processes must belong to."""

    address: str
    epoch: int
    placement: DraftPlacement = "colocated"
    uses_cuda_ipc: bool = False  # hidden states, outcomes and trees cross in the memory of the GPU of both processes


class DrafterHandshake(NamedTuple):
    """A drafter's first frame: what the engine must know about it."""

    max_draft_tokens: Annotated[int, Field(ge=0, lt=MAX_TREE_NODES)]
    aux_hidden_state_layers: Annotated[list[int], Field(max_length=MAX_LAYERS)]  # they repeat where a target has few
    reads_next_token: bool


# The target's first byte. It comes with the ring's file descriptor, or a frame with the reason follows.
ACCEPTED, REFUSED = b"f", b"r"
NO_DRAFTER = DrafterHandshake(0, [], False)


def dismiss(endpoint: DraftEndpoint, timeout: float) -> None:
    """Make the target continue without a drafter; returns before its next step.

    Raises TimeoutError if the target starts no step within `timeout` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(ChannelClosedError):
        connection.connect(endpoint.address)
        channel = Channel(connection, endpoint.epoch)
        channel.send(pack_handshake(NO_DRAFTER), timeout)
        channel.recv(timeout)  # the target closes the connection when it has read the handshake


def listen(address: str) -> socket.socket:
    """The target's listening socket. `accept` on it does not block."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(address)
    server.listen(2)
    server.setblocking(False)
    return server


def accept(server: socket.socket) -> socket.socket | None:
    """The next waiting connection, or None. Connections from processes of other users are closed."""
    try:
        connection, _ = server.accept()
    except BlockingIOError:
        return None
    if peer_user(connection) not in (None, os.geteuid()):
        connection.close()
        return None
    return connection


def peer_user(connection: socket.socket) -> int | None:
    """The user id of the process at the other end; None where the system does not provide it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def pack_handshake(handshake: DrafterHandshake) -> bytes:
    data: bytes = msgpack.packb(handshake)
    return data


def unpack_handshake(data: bytes, num_layers: int) -> DrafterHandshake:
    """The handshake of a drafter for a target with `num_layers` layers. ValueError if it is invalid."""
    try:
        handshake = _HANDSHAKE.validate_python(msgpack.unpackb(data), strict=True)
    except ValueError as error:  # of msgpack or pydantic
        raise ValueError(f"not a handshake: {error}") from None
    if not all(-1 <= layer <= num_layers for layer in handshake.aux_hidden_state_layers):
        raise ValueError(f"not a handshake for this target: {handshake}")
    return handshake


_HANDSHAKE = TypeAdapter(DrafterHandshake)
