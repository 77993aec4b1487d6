"""Who may come in at a target's door, and with which words."""

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
    answer,
    dismiss,
    listen,
    pack_handshake,
    unpack_handshake,
)

NUM_LAYERS = 4
SOUND = DrafterHandshake(7, [0, 2, NUM_LAYERS], True)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[tuple[socket.socket, DraftEndpoint]]:
    place = DraftEndpoint(str(tmp_path / "drafts"), epoch=5)
    with listen(place.address) as server:
        yield server, place


def test_a_sound_handshake_is_read_as_it_was_said() -> None:
    assert unpack_handshake(pack_handshake(SOUND), NUM_LAYERS) == SOUND


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
        [7, [-1], True],
        [7, [NUM_LAYERS + 1], True],
        [7, ["0"], True],
        [7, [2] * 1000, True],
        [7, [0], 1],
    ],
)
def test_any_other_handshake_is_refused(handshake: Any) -> None:
    with pytest.raises(ValueError, match="hello"):
        unpack_handshake(msgpack.packb(handshake), NUM_LAYERS)


def test_bytes_that_are_no_message_are_no_handshake() -> None:
    with pytest.raises(ValueError, match="not a hello"):
        unpack_handshake(b"\xc1\xff", NUM_LAYERS)


def test_nobody_at_the_door_is_nobody_to_wait_for(door: tuple[socket.socket, DraftEndpoint]) -> None:
    assert answer(door[0]) is None


def test_processes_of_other_users_stay_outside(
    door: tuple[socket.socket, DraftEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, place = door
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(place.address)
        inside = answer(server)
        assert inside is not None
        assert handshake.peer_user(inside) == os.geteuid()
        inside.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(place.address)
        assert answer(server) is None
        assert visitor.recv(1) == b""


def test_whoever_dismisses_the_drafter_waits_for_the_next_step(door: tuple[socket.socket, DraftEndpoint]) -> None:
    server, place = door
    with pytest.raises(TimeoutError):
        dismiss(place, timeout=0.05)
    connection = answer(server)
    assert connection is not None
    with connection:
        assert unpack_handshake(Channel(connection, place.epoch).recv(1.0), NUM_LAYERS) == handshake.NOBODY
