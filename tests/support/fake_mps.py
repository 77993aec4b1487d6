"""Programs that stand for NVIDIA's on a machine without a GPU: an MPS daemon that records what it is asked."""

import os
import signal
import time
from pathlib import Path

import psutil

SERVER = "4242"  # process ID that the daemon reports of its server
UUIDS = ["GPU-aaaa", "GPU-bbbb"]

# `deaf`, `broken` and `mute` are files beside it: a daemon that does not quit, does not start, or does not answer.
CONTROL = f"""#!/bin/sh
here=$(dirname "$0")
if [ "$1" = -f ]; then
    [ -e "$here/broken" ] && {{ echo "not permitted"; exit 1; }}
    env | grep CUDA_ | sort > "$here/environment"
    echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/daemon"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ] || [ -e "$here/deaf" ]; do sleep 0.02; done
    exit
fi
[ -e "$CUDA_MPS_PIPE_DIRECTORY/daemon" ] || {{ echo "Cannot find MPS control daemon process" >&2; exit 1; }}
[ -e "$here/mute" ] && exit 1
read -r command
echo "$command" >> "$here/commands"
case $command in
    get_server_list) echo {SERVER};;
    quit*) touch "$CUDA_MPS_PIPE_DIRECTORY/quit";;
esac
"""
SMI = "#!/bin/sh\n" + "".join(f'echo "{number}, {uuid}"\n' for number, uuid in enumerate(UUIDS))


class FakeMps:
    """The programs, in a folder of their own that comes first in `path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, script in (("nvidia-cuda-mps-control", CONTROL), ("nvidia-smi", SMI)):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    @property
    def environment(self) -> dict[str, str]:
        """CUDA's variables of the daemon."""
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def commands(self) -> list[str]:
        """What the daemon was asked, without the question whether it has started."""
        file = self.folder / "commands"
        return file.read_text().splitlines() if file.exists() else []

    def daemon(self) -> psutil.Process:
        """The daemon, which runs."""
        return psutil.Process(int(Path(self.environment["CUDA_MPS_PIPE_DIRECTORY"], "daemon").read_text()))


def die_as_ray_does() -> None:
    """End this process as a worker that Ray ends or kills: its children first."""
    for child in psutil.Process().children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def has_ended(process: psutil.Process, timeout_s: float = 20.0) -> bool:
    """Whether a process that is nobody's child ends in time."""
    until = time.monotonic() + timeout_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
