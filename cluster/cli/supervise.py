"""The process that a user starts and stops: it runs the launcher, and ends everything that the launcher has started.

The launcher and Ray's processes have a session of their own, so that a signal to this process's group reaches only this
process. It loads no library and blocks all signals except while it waits for one: none is lost, whatever the launcher
does. Started as `python -m cluster.cli.supervise FOLDER` in the environment that `serve` prepares.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specray.private_folders import disown, processes_with

LAUNCHER = "cluster.cli.launcher"
POLL_S = 1.0  # at most between looks at the launcher; its end interrupts the wait
REPEAT_S = 1.0  # until then a signal is the first one again, sent to the process and to its group
LEAVE_S = 5.0  # for Ray's processes to end by themselves
SCAN_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Exit status: the launcher's; 128 + the signal's number if that came before the server was ready."""
    folder = Path(arguments[0])
    signals = block_signals()
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", LAUNCHER, *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
    )
    received = _wait(launcher, signals)
    status = launcher.returncode
    _end_processes(folder, LEAVE_S if status in (0, 2) else 0.0)
    if received is None and status not in (0, 2):
        if status != 1:
            _say(f"error: the launcher ended with status {status}")
        _say(f"Ray's logs: {Path(os.environ.get('RAY_TMPDIR', '/tmp'), 'ray/session_latest/logs')}")
        disown(folder)  # it has the logs
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    if received is None or status == 0:
        return status
    _say("interrupted")
    return 128 + received


def block_signals() -> set[signal.Signals]:
    """Block the signals that end a process, except ignored ones, until the program waits for them. Returns them."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signals = {number for number in ending if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    this = threading.get_ident()
    for number in signals:  # another thread may receive it
        signal.signal(number, lambda received, _: signal.pthread_kill(this, received))
    return signals


def _wait(launcher: subprocess.Popen[bytes], signals: set[signal.Signals]) -> int | None:
    """Wait for the launcher's end. The first signal stops it, a second one kills it; returns the first."""
    first, since = None, 0.0
    assert launcher.stdin is not None
    while launcher.poll() is None:
        info = signal.sigtimedwait(signals | {signal.SIGCHLD}, POLL_S)
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        if first is None:
            first, since = info.si_signo, time.monotonic()
            launcher.stdin.close()
            launcher.terminate()  # for one that does not yet read its input
        elif time.monotonic() - since > REPEAT_S:
            launcher.kill()
    return first


def _end_processes(folder: Path, patience_s: float) -> None:
    """Kill the processes of the folder that have not ended by themselves in this time."""
    give_up = time.monotonic() + patience_s
    while pids := list(processes_with("TMPDIR", folder)):
        if time.monotonic() >= give_up:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(SCAN_S)


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
