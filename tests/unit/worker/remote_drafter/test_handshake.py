"""Which connections and handshakes a target accepts."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from specray.channel import Channel
from specray.config import MAX_TREE_NODES
from specray.worker.remote_drafter import handshake
from specray.worker.remote_drafter.handshake import (
    DraftEndpoint,
    DrafterHandshake,
    accept,
    dismiss,
    listen,
    pack_handshake,
    unpack_handshake,
)

NUM_LAYERS = 4
VALID = DrafterHandshake(7, [0, 2, NUM_LAYERS], True)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[socket.socket, DraftEndpoint]]:
    place = DraftEndpoint(str(tmp_path / "drafts"), epoch=5)
    with listen(place.address) as server:
        yield server, place


def test_a_handshake_survives_the_wire() -> None:
    assert unpack_handshake(pack_handshake(VALID), NUM_LAYERS) == VALID


@pytest.mark.parametrize(
    "handshake",
    [
        "hello",
        None,
        [7, [0]],
        [7, [0], True, 1],
        [-1, [0], True],
        [MAX_TREE_NODES, [0], True],
        [2.5, [0], True],
        [True, [0], True],
        [7, 0, True],
        [7, [-2], True],
        [7, [NUM_LAYERS + 1], True],
        [7, ["0"], True],
        [7, [2] * 1000, True],
        [7, [0], 1],
    ],
)
def test_any_other_handshake_is_refused(handshake: Any) -> None:
    with pytest.raises(ValueError, match="handshake"):
        unpack_handshake(msgpack.packb(handshake), NUM_LAYERS)


def test_bytes_that_are_not_msgpack_are_refused() -> None:
    with pytest.raises(ValueError, match="not a handshake"):
        unpack_handshake(b"\xc1\xff", NUM_LAYERS)


def test_accept_does_not_wait(listening: tuple[socket.socket, DraftEndpoint]) -> None:
    assert accept(listening[0]) is None


def test_processes_of_other_users_are_refused(
    listening: tuple[socket.socket, DraftEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, place = listening
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.address)
        accepted = accept(server)
        assert accepted is not None
        assert handshake.peer_user(accepted) == os.geteuid()
        accepted.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.address)
        assert accept(server) is None
        assert client.recv(1) == b""


def test_dismiss_waits_for_the_next_step(listening: tuple[socket.socket, DraftEndpoint]) -> None:
    server, place = listening
    with pytest.raises(TimeoutError):
        dismiss(place, timeout=0.05)
    connection = accept(server)
    assert connection is not None
    with connection:
        assert unpack_handshake(Channel(connection, place.epoch).recv(1.0), NUM_LAYERS) == handshake.NO_DRAFTER
