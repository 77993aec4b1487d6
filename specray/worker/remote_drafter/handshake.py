"""The door between a target rank and drafters in processes of their own: where it is, who may come in, what is said.

The first word decides: a drafter says what it is and takes the place of the one before it; `dismiss` says that nobody
drafts from now on. No torch here, because the router's process knocks, too. Not here: what is said once a drafter is in
(`draft_wire`), and who listens (`colocated`).
"""

import contextlib
import os
import socket
import struct
from typing import NamedTuple

import msgpack

from specray.channel import Channel, ChannelClosedError
from specray.config import MAX_TREE_NODES

_CREDENTIALS = struct.Struct("=3i")  # Linux's struct ucred: process, user, group


class DraftEndpoint(NamedTuple):
    """A unix socket in a private folder, and the life of the engine that those who knock must belong to."""

    address: str
    epoch: int


class DrafterHandshake(NamedTuple):
    """A drafter's first frame: what the engine has to know of it."""

    max_draft_tokens: int
    aux_hidden_state_layers: list[int]
    reads_next_token: bool


NOBODY = DrafterHandshake(0, [], False)


def dismiss(endpoint: DraftEndpoint, timeout: float) -> None:
    """Have the target go on without a drafter; returns before its next step. TimeoutError if it takes none so long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(ChannelClosedError):
        connection.connect(endpoint.address)
        channel = Channel(connection, endpoint.epoch)
        channel.send(pack_handshake(NOBODY), timeout)
        channel.recv(timeout)  # the target hangs up once it has heard


def listen(address: str) -> socket.socket:
    """The target's end; `answer` never waits."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(address)
    server.listen(2)
    server.setblocking(False)
    return server


def answer(server: socket.socket) -> socket.socket | None:
    """Whoever has knocked, if it is a process of this user; None if nobody has."""
    try:
        connection, _ = server.accept()
    except BlockingIOError:
        return None
    if peer_user(connection) not in (None, os.geteuid()):
        connection.close()
        return None
    return connection


def peer_user(connection: socket.socket) -> int | None:
    """The user whose process is at the other end; None where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def pack_handshake(handshake: DrafterHandshake) -> bytes:
    data: bytes = msgpack.packb(handshake)
    return data


def unpack_handshake(data: bytes, num_layers: int) -> DrafterHandshake:
    """ValueError for anything that is not a sound hello to a target of so many layers."""
    try:
        handshake = DrafterHandshake(*msgpack.unpackb(data))
        is_sound = _is_sound(handshake, num_layers)
    except (TypeError, ValueError) as error:  # msgpack's own errors are among them
        raise ValueError(f"not a hello: {error}") from None
    if not is_sound:
        raise ValueError(f"a hello that no drafter of this target would say: {handshake}")
    return handshake


def _is_sound(handshake: DrafterHandshake, num_layers: int) -> bool:
    layers = handshake.aux_hidden_state_layers
    return (
        type(handshake.max_draft_tokens) is int
        and 0 <= handshake.max_draft_tokens < MAX_TREE_NODES
        and type(layers) is list
        and all(type(layer) is int and 0 <= layer <= num_layers for layer in layers)
        and len(set(layers)) == len(layers)
        and type(handshake.reads_next_token) is bool
    )
