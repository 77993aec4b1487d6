"""NVIDIA's Multi-Process Service (MPS) of one engine: its ranks and drafters compute at the same time on a shared GPU.

Without it, processes on one GPU take turns. Each engine has a daemon of its own, so that a fault of one engine does not
end another one. Sources: NVIDIA's manual "Multi-Process Service" and `man nvidia-cuda-mps-control`.
"""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.config import AppConfig
from cluster.engine.placement import uses_gpus
from cluster.liveness.actors import MPS_FOLDER, NVIDIA_SMI, Process

CONTROL = "nvidia-cuda-mps-control"
LOG_FOLDER = "CUDA_MPS_LOG_DIRECTORY"
IN_USE = "on"
ANOTHER = f"the daemon of {MPS_FOLDER} is used"
NO_DAEMON = "/dev/null"  # as MPS_FOLDER: CUDA finds no daemon and continues without MPS
START_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 2.0  # of a command; a drafter that is to be killed waits for two of them
END_TIMEOUT_S = 10  # for the daemon and its server; the server has half of it for processes that still run
_POLL_S = 0.05
_SHOWN_LOG_LINES = 3

# It ends the daemon when this process closes the pipe, or has died in any way. It is a background process, because Ray
# kills the children of a process that ends, and has a process group of its own with the daemon and the daemon's server.
_GUARD = """
exec 3<&0
(
    "$1" -f &
    daemon=$!
    read -r _ <&3
    (sleep "$3"; kill -KILL 0) &
    echo "quit -t $((($3 + 1) / 2))" | "$1"
    wait $daemon
    kill -KILL 0
) >"$2" 2>&1 &
echo $!
"""

logger = logging.getLogger("ray.serve")


def reason_not_started(config: AppConfig, environment: Mapping[str, str]) -> str:
    """Why an engine on this node starts no MPS daemon; empty if it does. `config.device` is decided."""
    if not (uses_gpus(config) and config.has_draft_actor and config.draft_placement == "colocated"):
        return "no drafter shares a rank's GPU"
    if config.draft.mps == "off":
        return "draft.mps: off"
    if config.placement.across_nodes:
        return "placement.across_nodes: a daemon serves one node"
    if (pipes := environment.get(MPS_FOLDER)) and _ask(pipes, "get_server_list") is not None:
        return ANOTHER
    missing = [program for program in (CONTROL, NVIDIA_SMI) if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found on this node" if missing else ""


def terminate_client(pipes: str, pid: int) -> None:
    """Ask the daemon whose folder is `pipes` to terminate a client process that is about to be killed.

    If a client is killed without this, the daemon's other clients are in an undefined state.
    """
    for server in (_ask(pipes, "get_server_list") or "").split():
        _ask(pipes, f"terminate_client {server} {pid}")


class MpsDaemon:
    """An engine's daemon. Its files are in the engine's private `folder` and are removed with it.

    `start` comes before any process of the engine initialises CUDA, and `close` after all of them have ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder / "mps", folder / "mps-log"
        for each in (self._folder, self._log):
            each.mkdir(mode=0o700)
        self.pipes = str(self._folder)  # MPS_FOLDER of the processes that compute
        self._guard: subprocess.Popen[str] | None = None
        self._process: Process | None = None  # of the guard in the background

    def start(self, gpus: Sequence[str]) -> str:
        """Start the daemon for GPUs, by UUID: it renumbers those that it is given.

        Returns IN_USE, or why it does not run. CUDA then works without it.
        """
        if not all(gpu.startswith(("GPU-", "MIG-")) for gpu in gpus):
            logger.error("MPS is not used: %s gave no UUIDs of the GPUs %s", NVIDIA_SMI, ", ".join(gpus))
            return f"{NVIDIA_SMI} gave no UUIDs"
        own = {MPS_FOLDER: self.pipes, LOG_FOLDER: str(self._log), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        program, log = shutil.which(CONTROL), self._log / "guard.log"
        assert program is not None, "see `reason_not_started`"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", program, str(log), str(END_TIMEOUT_S)],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        self._process = Process(int(self._guard.stdout.readline()))
        until = time.monotonic() + START_TIMEOUT_S
        while _ask(self.pipes, "get_server_list") is None:
            if time.monotonic() > until:
                self.close()
                for pipe in self._folder.iterdir():  # which nobody reads any more
                    pipe.unlink()
                said = " ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LOG_LINES:])
                logger.error("MPS is not used: %s has not started in %g s: %s", CONTROL, START_TIMEOUT_S, said)
                return f"{CONTROL} has not started"
            time.sleep(_POLL_S)
        logger.info("MPS serves %s", ", ".join(gpus))
        return IN_USE

    def close(self) -> None:
        """End the daemon, by force after some seconds. Idempotent."""
        if self._guard is None or self._process is None:
            return
        for pipe in (self._guard.stdin, self._guard.stdout):
            assert pipe is not None
            pipe.close()
        self._guard.wait()
        self._process.kill(END_TIMEOUT_S + 1.0)
        self._guard = self._process = None


def _ask(pipes: str, command: str) -> str | None:
    """The answer of the daemon with this folder; None if there is none."""
    try:
        answer = subprocess.run(
            [CONTROL],
            input=f"{command}\n",
            env=os.environ | {MPS_FOLDER: pipes},
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the MPS daemon does not answer: %s", error)
        return None
    return answer.stdout if answer.returncode == 0 else None
