"""Measured figures as data: one JSON file in `benchmarks/results` for each machine and day.

The documentation's figures are made of these files by `benchmarks.report`. A program that measures saves what it found
as soon as it has it; what was measured again on the same day replaces the earlier figure.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from specray.bench.machine import describe_machine, versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Result(BaseModel):
    """One figure: a cell of a table of the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    row: str
    column: str
    value: float
    form: str = "{:.2f}"  # of `value` and `goal`
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound
    samples: tuple[float, ...] = ()  # `value` is their median; empty where a program keeps none
    commit: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.table, self.row, self.column

    @property
    def is_reached(self) -> bool:
        """Whether the goal, if there is one, is reached."""
        return self.goal is None or (self.value <= self.goal if self.at_most else self.value >= self.goal)


class ResultFile(BaseModel):
    """What was measured on one machine on one day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str
    day: date
    facts: dict[str, str | int]  # see `describe_machine`
    versions: dict[str, str]
    results: tuple[Result, ...]


def save(machine: str | None, results: Sequence[Result], more_versions: dict[str, str] | None = None) -> Path:
    """Add figures of today; `machine` None: the name is made of this machine's processor. Returns the file."""
    facts = describe_machine()
    machine = machine or _name_of(facts)
    day = date.today()
    path = RESULTS / _folder_of(machine) / f"{day.isoformat()}.json"
    before = _read(path) if path.is_file() else None
    new = {result.key for result in results}
    kept = [] if before is None else [result for result in before.results if result.key not in new]
    all_versions = {**({} if before is None else before.versions), **versions(), **(more_versions or {})}
    file = ResultFile(machine=machine, day=day, facts=facts, versions=all_versions, results=(*kept, *results))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text_of(file), encoding="utf-8")
    return path


def load() -> dict[str, list[ResultFile]]:
    """All files by machine, the oldest first. Raises ValueError for a file that is none."""
    found: dict[str, list[ResultFile]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        file = _read(path)
        found.setdefault(file.machine, []).append(file)
    return found


def commit_here() -> str:
    """The commit of this checkout, with a + if files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _read(path: Path) -> ResultFile:
    return ResultFile.model_validate_json(path.read_text(encoding="utf-8"))


def _text_of(file: ResultFile) -> str:
    """A line for each figure, so that a change of one is a change of one line."""
    content = file.model_dump(mode="json", exclude={"results"})
    head = json.dumps(content, indent=1)[:-2]
    lines = [json.dumps(result.model_dump(mode="json", exclude_defaults=True)) for result in file.results]
    return f'{head},\n "results": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _name_of(facts: dict[str, str | int]) -> str:
    return str(facts["gpu"]) if "gpu" in facts else f"{facts['cpu']}, {facts['cores']} cores"


def _folder_of(machine: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
