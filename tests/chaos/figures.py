"""Files of figures that `make chaos` writes: one for each model and fault, to which each run adds itself."""

import json
import subprocess
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from specray.bench import machine
from tests.chaos.ledger import Ending, Ledger, Unanswered, quantile

ROOT = Path(__file__).parents[2]


class FaultReport(NamedTuple):
    """The outcome of one fault."""

    name: str
    count: int
    ledger: Ledger
    recoveries: list[float]
    problems: list[str]
    unexpected: list[Unanswered]  # requests that ended in a way that the fault does not allow


def write_figures(folder: Path, model: str, report: FaultReport) -> None:
    """Add a run to the file of its model and fault."""
    path = folder / f"{model}-{report.name.replace(' ', '-')}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    runs.append(
        {
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine.describe_machine(),
            "versions": machine.versions(),
            "injected": report.count,
            "endings": {ending.value: report.ledger.endings[ending] for ending in Ending},
            "recovery_s": [round(seconds, 1) for seconds in report.recoveries],
            "longest_gap_s": round(max(report.ledger.gaps, default=0.0), 2),
            "gap_p99_s": round(quantile(report.ledger.gaps, 0.99) or 0.0, 2),
            "problems": report.problems,
            "unexpected": [str(request) for request in report.unexpected],
        }
    )
    endings = sum((Counter(run["endings"]) for run in runs), Counter[str]())
    document = {
        "model": model,
        "fault": report.name,
        "injected": sum(len(run["recovery_s"]) for run in runs),
        "endings": {ending.value: endings[ending.value] for ending in Ending},
        "problems": sum(len(run["problems"]) for run in runs),
        "runs": runs,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def commit() -> str:
    """The checkout's commit; with a plus sign if files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
