"""Collectives between ranks in two processes."""

import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path

from specray.layers.parallel import RankGroup

SIZES = (0, 1, 4087, 4088, 4089, 8192, 100_000)  # around the 4,096 bytes that go at once, 8 of them the length


def test_broadcast_of_bytes_of_any_length(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/ranks"
    spawn = multiprocessing.get_context("spawn")
    received: Queue[list[bytes]] = spawn.Queue()
    follower = spawn.Process(target=_listen, args=(meeting, received), daemon=True)
    follower.start()
    group = RankGroup(0, 2, meeting)
    sent = [_message(size) for size in SIZES]
    assert [group.broadcast_bytes(message) for message in sent] == sent
    assert received.get(timeout=30) == sent
    group.close()
    follower.join(30)
    assert follower.exitcode == 0


def _listen(meeting: str, received: "Queue[list[bytes]]") -> None:
    group = RankGroup(1, 2, meeting)
    received.put([group.broadcast_bytes(None) for _ in SIZES])
    group.close()


def _message(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))
