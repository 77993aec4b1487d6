"""Heartbeats and their deadlines, and killing a frozen process.

A stall of the watcher's own event loop is not taken for the death of the other side.
"""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.liveness.actors import Process
from specray.heartbeat import NUM_PARTS, HeartbeatFile, LocalHeartbeat, SilenceWatch, within
from tests.support.processes import TIMEOUT_S, wait_until

BEATING = "import sys, time; from pathlib import Path; from specray.heartbeat import HeartbeatFile; "
BEATING += "HeartbeatFile(Path(sys.argv[1])).keep_beating(); print('ready', flush=True); time.sleep(60)"


def test_a_frozen_process_stops_beating_and_can_be_killed(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = HeartbeatFile(path)
    assert heartbeat.silence_s == 0.0
    assert heartbeat.pid is None
    assert not heartbeat.has_loaded
    with subprocess.Popen([sys.executable, "-c", BEATING, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        path.unlink()  # both processes have it open
        time.sleep(0.6)
        wait_until(lambda: heartbeat.silence_s < 0.5)
        assert heartbeat.pid == child.pid
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: heartbeat.silence_s > 0.6)
        process = Process(child.pid)
        process.kill()
        process.kill()
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_process_that_ends_in_time_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as child:
        Process(child.pid).kill(grace_s=10.0)
        assert child.wait() == 0


def test_killing_a_process_that_has_ended_does_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        process = Process(child.pid)
        child.wait()
    process.kill()


def test_a_heartbeat_is_overdue_once_its_deadline_has_passed() -> None:
    now = 100.0
    heartbeat = LocalHeartbeat(lambda: now)
    assert not heartbeat.has_beaten
    assert not heartbeat.is_overdue(0.0)  # before the first beat
    heartbeat.beat()
    now += 3.0
    assert heartbeat.silence_s == 3.0
    assert not heartbeat.is_overdue(3.0)
    assert heartbeat.is_overdue(2.9)
    heartbeat.beat()
    assert not heartbeat.is_overdue(0.0)


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
