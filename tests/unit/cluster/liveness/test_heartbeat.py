"""A process that does not run shows, and ends when it is told to."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.liveness.heartbeat import Heartbeat, Process

BEATING = "import sys, time; from pathlib import Path; from cluster.liveness.heartbeat import Heartbeat; "
BEATING += "Heartbeat(Path(sys.argv[1])).keep_beating(); print('ready', flush=True); time.sleep(60)"


def test_a_frozen_process_falls_silent_and_can_be_ended(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    heartbeat = Heartbeat(path)
    assert heartbeat.silence() == 0.0
    assert heartbeat.pid is None
    assert not heartbeat.is_at_work
    with subprocess.Popen([sys.executable, "-c", BEATING, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        path.unlink()  # both have it open
        time.sleep(0.6)
        assert heartbeat.silence() < 0.5
        assert heartbeat.pid == child.pid
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        assert heartbeat.silence() > 0.6
        process = Process(child.pid)
        process.kill()
        process.kill()
        assert child.wait(5) == -signal.SIGKILL


def test_a_process_that_is_gone_is_nobody_elses_number() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        process = Process(child.pid)
        child.wait()
    process.kill()
