"""The process that a user starts and stops: it runs `serve` and the launcher, and ends all that they have started.

They and Ray's processes have a session of their own, so that a signal to this process's group reaches no other. It
loads no library and blocks the signals that end a process except while it waits for one, so that none is lost, whatever
its child does.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specray.private_folders import disown, end_processes, make_folder

FOLDER = "SPECRAY_SERVE_FOLDER"  # in the environment of all processes of a server: its folder
SERVING = "serving"  # a file in it: the applications are ready, so that stopping may take as long as a drain
POLL_S = 0.5  # at most between looks at the child; its end interrupts the wait
REPEAT_S = 1.0  # a second signal within this time is the first one, sent to the process and to its group
START_LEAVE_S = 10.0  # for the child to end while it starts
LEAVE_S = 5.0  # for Ray's processes to end by themselves
KILL_S = 10.0  # for the system to end killed processes


def main(arguments: Sequence[str]) -> int:
    """Exit status: the child's; 128 + the signal's number if that came before the server was ready."""
    signals = block_signals()
    folder = make_folder()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.cli.serve", *arguments],
        env={**os.environ, FOLDER: str(folder)},
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
    )
    received = _wait(child, signals, folder)
    status = child.returncode
    end_processes(FOLDER, folder, LEAVE_S if status in (0, 2) else 0.0, KILL_S)
    logs = Path(os.environ.get("RAY_TMPDIR", folder), "ray/session_latest/logs")
    if received is None and status not in (0, 2) and logs.exists():
        if status != 1:
            _say(f"error: the server's main process ended with status {status}")
        _say(f"Ray's logs: {logs}")
        disown(folder)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    if received is None or status == 0:
        return status
    _say("interrupted")
    return 128 + received


def block_signals() -> set[signal.Signals]:
    """Block the signals that end a process, until the program waits for them. Returns them.

    A program that a script starts in the background ignores SIGINT, but a server is stopped by it. `nohup` still works.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    return signals


def _wait(child: subprocess.Popen[bytes], signals: set[signal.Signals], folder: Path) -> int | None:
    """Wait for the child's end. The first signal stops it, a second one kills it; returns the first."""
    first, since = None, 0.0
    assert child.stdin is not None
    while child.poll() is None:
        info = signal.sigtimedwait(signals | {signal.SIGCHLD}, POLL_S)
        number = info.si_signo if info is not None and info.si_signo in signals else None
        if first is None and number is not None:
            first, since = number, time.monotonic()
            child.stdin.close()  # the launcher's request to stop
            child.terminate()  # for one that does not read it yet
        elif first is not None:
            waited = time.monotonic() - since
            is_second = number is not None and waited > REPEAT_S
            if is_second or (waited > START_LEAVE_S and not (folder / SERVING).exists()):
                child.kill()
    return first


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)
