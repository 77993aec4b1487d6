"""Framing, epochs and errors of the step channel."""

import fcntl
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from specray.channel import Channel, ChannelClosedError, spin_seconds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_frames_arrive_whole_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = Channel(pair[0], 7), Channel(pair[1], 7)
    frames = [b"", b"a", b"x" * 3_000_000, b"end"]
    sender = threading.Thread(target=lambda: [left.send(frame) for frame in frames])
    sender.start()
    assert [right.recv(5.0) for _ in frames] == frames
    sender.join()


def test_frames_of_another_epoch_are_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    Channel(pair[0], 1).send(b"late reply of a dead step")
    Channel(pair[0], 2).send(b"reply")
    assert Channel(pair[1], 2).recv(5.0) == b"reply"


def test_a_timeout_keeps_a_partial_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    reader = Channel(pair[1], 3)
    frame = struct.pack(">IQ", 4, 3) + b"four"
    pair[0].sendall(frame[:9])
    with pytest.raises(TimeoutError):
        reader.recv(0.02)
    pair[0].sendall(frame[9:14])
    with pytest.raises(TimeoutError):
        reader.recv(0.02)
    pair[0].sendall(frame[14:])
    assert reader.recv(5.0) == b"four"


def test_a_closed_connection_raises_in_recv_and_send(pair: tuple[socket.socket, socket.socket]) -> None:
    reader = Channel(pair[1], 1)
    pair[0].sendall(b"half a header"[:5])
    pair[0].close()
    with pytest.raises(ChannelClosedError):
        reader.recv(5.0)
    with pytest.raises(ChannelClosedError):
        reader.send(b"x" * 10_000_000)


def test_polling_before_it_sleeps_delays_no_frame_and_no_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = Channel(pair[0], 1), Channel(pair[1], 1)
    for spin_s, delay in ((60.0, 0.02), (0.01, 0.1)):  # the frame comes while it polls, and while it sleeps
        sender = threading.Timer(delay, left.send, [b"late"])
        sender.start()
        assert right.recv(None, spin_s) == b"late"
        sender.join()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        right.recv(0.02, 60.0)
    assert time.monotonic() - start < 30.0


def test_polling_takes_every_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    try:
        large = socket.socket(fileno=fcntl.fcntl(pair[1].fileno(), fcntl.F_DUPFD, 1024))
        reader = Channel(large, 1)
        assert not reader.poll(0.0)
        Channel(pair[0], 1).send(b"frame")
        assert reader.poll(5.0)
        assert reader.recv(0.0) == b"frame"
        pair[0].close()
        assert reader.poll(5.0)  # to find out that it was closed
        reader.close()
        with pytest.raises(ChannelClosedError):
            reader.poll(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_short_wait_is_not_rounded_up(pair: tuple[socket.socket, socket.socket]) -> None:
    """The step loop looks at the device by turns with the channel, and a step may take less than a millisecond."""
    reader, seconds = Channel(pair[1], 1), []
    for _ in range(50):
        start = time.perf_counter()
        assert not reader.poll(2e-5)
        seconds.append(time.perf_counter() - start)
    assert 2e-5 <= min(seconds) < 5e-4
    threading.Timer(0.02, Channel(pair[0], 1).send, [b"frame"]).start()
    until = time.monotonic() + 60.0
    while not reader.poll(2e-5):
        assert time.monotonic() < until
    assert reader.recv(0.0) == b"frame"


@pytest.mark.parametrize(("device", "cores", "spins"), [("cuda", 16, True), ("cuda", 4, False), ("cpu", 16, False)])
def test_only_a_gpu_with_many_cores_lets_processes_poll(
    device: str, cores: int, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specray.channel.num_cores", lambda: cores)
    assert (spin_seconds(device) > 0) == spins
