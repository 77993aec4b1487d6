"""`make chaos --out`: runs of a fault add up in its file."""

import json
from pathlib import Path

from tests.chaos.figures import FaultReport, write_figures
from tests.chaos.ledger import Ending, Ledger


def test_runs_add_up(tmp_path: Path) -> None:
    for number in (1, 2):
        ledger = Ledger()
        ledger.enter(Ending.COMPLETE, 0.5 * number)
        ledger.enter(Ending.REFUSED, 0.1)
        report = FaultReport("router killed", 3, ledger, [20.0, 21.0], [f"problem {number}"])
        write_figures(tmp_path / "figures", "toy", report)
    [path] = (tmp_path / "figures").iterdir()
    assert path.name == "toy-router-killed.json"
    figures = json.loads(path.read_text())
    assert (figures["injected"], figures["problems"]) == (4, 2)  # the third fault of each run was not recovered from
    assert (figures["endings"]["complete"], figures["endings"]["refused"], figures["endings"]["lost"]) == (2, 2, 0)
    assert [run["longest_gap_s"] for run in figures["runs"]] == [0.5, 1.0]
    assert all(run["commit"] and run["machine"] and run["versions"] for run in figures["runs"])
