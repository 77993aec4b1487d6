"""`python -m tests.chaos.unguarded`: each fault once with its guard taken out, which must then be seen to fail.

A check that nothing can fail proves nothing. Works on a copy of the code; minutes for each fault, for a service that
does not come back is waited for. Exit status 1 if a fault went by unnoticed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("cluster", "specray", "tests", "pyproject.toml")


class NodeWatchdog(NamedTuple):
    """A change of one file that takes a guard out."""

    file: str
    old: str
    new: str


NO_FAILOVER = NodeWatchdog("cluster/routing/router_pool.py", "MAX_FAILOVERS = 8 ", "MAX_FAILOVERS = 0 ")
NO_DRAIN = NodeWatchdog(
    "cluster/routing/client.py", "if self._closes_when_idle and not self._listeners:", "if self._closes_when_idle:"
)
NO_NEW_DRAFTER = NodeWatchdog(
    "cluster/engine/draft.py", "                self._restart(reason)", "                pass"
)
GUARDS: dict[str, tuple[NodeWatchdog, ...]] = {
    "router killed": (NO_FAILOVER,),
    "router frozen": (
        NodeWatchdog("cluster/routing/client.py", "HEARTBEAT_TIMEOUT_S = 3.0 ", "HEARTBEAT_TIMEOUT_S = 1e6 "),
        NodeWatchdog("cluster/liveness/watchdog.py", "ROUTER_FROZEN_S = 8.0 ", "ROUTER_FROZEN_S = 1e6 "),
    ),
    "rank killed": (NO_FAILOVER,),
    "rank frozen": (NodeWatchdog("cluster/liveness/watchdog.py", "FROZEN_S = 3.0 ", "FROZEN_S = 1e6 "),),
    "drafter killed": (NO_NEW_DRAFTER,),
    "drafter frozen": (NodeWatchdog("specray/worker/remote_drafter/source.py", "FROZEN_S = 3.0 ", "FROZEN_S = 1e6 "),),
    "drafter lies": (NO_NEW_DRAFTER,),
    "GCS killed for 4 s": (
        NodeWatchdog("tests/chaos/service.py", '"gcs_storage": "rocksdb", "gcs_storage_path": str(folder / "gcs")', ""),
    ),
    "node lost": (NO_FAILOVER,),
    "redeployed": (NO_DRAIN, NO_FAILOVER),
    "clients leave": (
        NodeWatchdog(
            "specray/engine/engine.py",
            "        self.scheduler.finish(request)\n",
            "        if reason is not FinishReason.ABORT:\n            self.scheduler.finish(request)\n",
        ),
    ),
    "overload": (
        NodeWatchdog(
            "specray/engine/scheduler.py", "if num_waiting >= self.max_queued +", "if False and self.max_queued +"
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.unguarded", description=__doc__)
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=GUARDS,
        default=list(GUARDS),
        metavar="NAME",
        help=f"only these of: {', '.join(GUARDS)}",
    )
    unseen = [name for name in parser.parse_args(argv).faults if not is_seen(name)]
    for name in unseen:
        print(f"NOT SEEN: {name}", file=sys.stderr)
    return 1 if unseen else 0


def is_seen(name: str) -> bool:
    """Whether chaos fails on this fault without its guard; prints what it said."""
    with tempfile.TemporaryDirectory(prefix="specray-unguarded-") as folder:
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(folder, part))
        for watchdog in GUARDS[name]:
            path = Path(folder, watchdog.file)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(watchdog.old, watchdog.new), encoding="utf-8")
        command = [sys.executable, "-m", "tests.chaos", "--models", "stories260K", "--count", "1", "--faults", name]
        chaos = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = [line for line in chaos.stderr.splitlines() if line.startswith("NOT ACCOUNTED FOR")]
    print(f"{name}: {'; '.join(said) or 'passed, or ended otherwise: ' + chaos.stderr[-500:]}", flush=True)
    return chaos.returncode == 1 and bool(said)


if __name__ == "__main__":
    sys.exit(main())
