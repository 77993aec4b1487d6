"""`python -m tests.chaos.unguarded`: each fault once with its safeguard removed, which must make the chaos test fail.

This shows that the chaos test can fail. It works on a copy of the code and takes minutes per fault, because it waits
for a service that does not recover. Exit status 1 if the chaos test passed without a safeguard.
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


class Safeguard(NamedTuple):
    """A change of one file that removes a safeguard."""

    file: str
    old: str
    new: str


NO_FAILOVER = Safeguard(
    "specray/server/routing/router_pool.py",
    "                await self._fail_over()\n",
    "                raise EngineDeadError(LOST)\n",
)
NO_DRAIN = Safeguard(
    "specray/server/routing/client.py",
    "if self._closes_when_idle and not self._listeners:",
    "if self._closes_when_idle:",
)
NO_NEW_DRAFTER = Safeguard(
    "cluster/engine/supervisor.py", "                self._restart(reason)", "                pass"
)
SAFEGUARDS: dict[str, tuple[Safeguard, ...]] = {
    "router killed": (NO_FAILOVER,),
    "router frozen": (
        Safeguard("specray/server/routing/client.py", "HEARTBEAT_TIMEOUT_S = 3.0 ", "HEARTBEAT_TIMEOUT_S = 1e6 "),
        Safeguard("cluster/liveness/watchdog.py", "ROUTER_FROZEN_S = 8.0 ", "ROUTER_FROZEN_S = 1e6 "),
    ),
    "rank killed": (NO_FAILOVER,),
    "rank frozen": (Safeguard("cluster/liveness/watchdog.py", "FROZEN_S = 3.0 ", "FROZEN_S = 1e6 "),),
    "drafter killed": (NO_NEW_DRAFTER,),
    "drafter frozen": (Safeguard("specray/worker/remote_drafter/source.py", "FROZEN_S = 3.0 ", "FROZEN_S = 1e6 "),),
    "drafter sends invalid data": (NO_NEW_DRAFTER,),
    "GCS killed for 4 s": (
        Safeguard("tests/chaos/service.py", '"gcs_storage": "rocksdb", "gcs_storage_path": str(folder / "gcs")', ""),
    ),
    "node lost": (NO_FAILOVER,),
    "request of death: crash": (
        Safeguard("specray/server/routing/router_pool.py", "                await self._refuse_poison(event)\n", ""),
    ),
    "redeployed": (NO_DRAIN, NO_FAILOVER),
    "clients leave": (
        Safeguard(
            "specray/engine/live_requests.py",
            "        self._scheduler.finish(request)\n",
            "        if reason is not FinishReason.ABORT:\n            self._scheduler.finish(request)\n",
        ),
    ),
    "overload": (
        Safeguard(
            "specray/engine/admission.py",
            "if num_waiting >= self._config.max_queued_requests +",
            "if False and self._config.max_queued_requests +",
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.unguarded", description=__doc__)
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=SAFEGUARDS,
        default=list(SAFEGUARDS),
        metavar="NAME",
        help=f"only these of: {', '.join(SAFEGUARDS)}",
    )
    undetected = [name for name in parser.parse_args(argv).faults if not is_detected(name)]
    for name in undetected:
        print(f"NOT DETECTED: {name}", file=sys.stderr)
    return 1 if undetected else 0


def is_detected(name: str) -> bool:
    """Whether the chaos test fails on this fault without its safeguard; prints its output."""
    with tempfile.TemporaryDirectory(prefix="specray-unguarded-") as folder:
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(folder, part))
        for safeguard in SAFEGUARDS[name]:
            path = Path(folder, safeguard.file)
            text = path.read_text(encoding="utf-8")
            assert safeguard.old in text, f"{safeguard.file} no longer contains {safeguard.old!r}"
            path.write_text(text.replace(safeguard.old, safeguard.new), encoding="utf-8")
        command = [sys.executable, "-m", "tests.chaos", "--models", "stories260K", "--count", "1", "--faults", name]
        chaos = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    failures = [line for line in chaos.stderr.splitlines() if line.startswith("NOT ACCOUNTED FOR")]
    print(f"{name}: {'; '.join(failures) or 'passed, or ended otherwise: ' + chaos.stderr[-500:]}", flush=True)
    return chaos.returncode == 1 and bool(failures)


if __name__ == "__main__":
    sys.exit(main())
