"""A stall of the watcher's own event loop is not taken for the death of the other side."""

import asyncio
import time

import pytest

from cluster.liveness.heartbeat import LocalHeartbeat
from cluster.liveness.own_stalls import NUM_PARTS, SilenceWatch, within


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[Clock, LocalHeartbeat, SilenceWatch]:
    clock = Clock()
    heartbeat = LocalHeartbeat(clock)
    heartbeat.beat()
    return clock, heartbeat, SilenceWatch(heartbeat, 0.5, clock)


def test_silence_grows_with_every_poll_in_time() -> None:
    clock, _, watch = watched()
    for polls in range(1, 8):
        clock.now += 0.5
        assert watch.poll() == pytest.approx(0.5 * polls)


def test_a_stall_counts_as_one_interval() -> None:
    clock, heartbeat, watch = watched()
    clock.now += 60.0
    assert watch.poll() == 0.5
    clock.now += 0.5
    heartbeat.beat()  # what had arrived during the stall is read after it
    clock.now += 0.1
    assert watch.poll() == pytest.approx(0.1)


def test_a_dead_peer_is_found_although_every_poll_is_late() -> None:
    clock, _, watch = watched()
    silences = []
    for _ in range(7):
        clock.now += 5.0
        silences.append(watch.poll())
    assert silences[-1] > 3.0


def test_an_answer_that_waited_out_a_stall_is_used() -> None:
    async def scenario() -> str:
        async def answer() -> str:
            await asyncio.sleep(0.01)
            return "answer"

        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        return await within(0.12, answer())

    assert asyncio.run(scenario()) == "answer"


def test_a_call_without_an_answer_ends_and_is_cancelled() -> None:
    """In time in one of three attempts: another process may stall this one, which then gets more time."""

    async def scenario() -> float:
        cancelled = asyncio.Event()

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await within(0.06, hang())
        seconds = time.monotonic() - start
        await asyncio.wait_for(cancelled.wait(), 5.0)
        return seconds

    assert any(asyncio.run(scenario()) < 0.06 * NUM_PARTS for _ in range(3))


def test_an_error_of_the_call_is_raised() -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(within(1.0, fail()))
