"""Heartbeats and their deadlines, and killing a frozen process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.liveness.heartbeat import HeartbeatFile, LocalHeartbeat
from cluster.liveness.process import Process

BEATING = "import sys, time; from pathlib import Path; from cluster.liveness.heartbeat import HeartbeatFile; "
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
        assert heartbeat.silence_s < 0.5
        assert heartbeat.pid == child.pid
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        assert heartbeat.silence_s > 0.6
        process = Process(child.pid)
        process.kill()
        process.kill()
        assert child.wait(5) == -signal.SIGKILL


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
