"""`make chaos --out`: runs of a fault add up in its file."""

import json
from pathlib import Path

from specray.bench.exchange import Exchange
from tests.chaos.figures import FaultReport, write_figures
from tests.chaos.ledger import Ending, Ledger


def test_runs_add_up(tmp_path: Path) -> None:
    for number in (1, 2):
        ledger = Ledger()
        ledger.enter(Ending.COMPLETE, Exchange(2.0, 200, longest_gap=0.5 * number))
        ledger.begin_injection()
        ledger.enter(Ending.REFUSED, Exchange(0.5, 503, {"retry-after": "2"}, b"no engine", longest_gap=0.1))
        report = FaultReport("router killed", 3, ledger, [20.0, 21.0], [f"problem {number}"], ledger.unanswered)
        write_figures(tmp_path / "figures", "toy", report)
    [path] = (tmp_path / "figures").iterdir()
    assert path.name == "toy-router-killed.json"
    figures = json.loads(path.read_text())
    assert (figures["injected"], figures["problems"]) == (4, 2)  # the third fault of each run was not recovered from
    assert (figures["endings"]["complete"], figures["endings"]["refused"], figures["endings"]["lost"]) == (2, 2, 0)
    assert [run["longest_gap_s"] for run in figures["runs"]] == [0.5, 1.0]
    assert all(run["commit"] and run["machine"] and run["versions"] for run in figures["runs"])


def test_a_request_without_an_answer_says_when_it_was_sent_and_what_came() -> None:
    ledger = Ledger()
    ledger.begin_injection()
    ledger.enter(Ending.COMPLETE, Exchange(2.0, 200))
    ledger.enter(Ending.REFUSED, Exchange(0.5, 503, {"retry-after": "2"}, b"no engine"))
    ledger.enter(Ending.CUT, Exchange(0.5, error="reset by peer"))
    refused, cut = (str(request) for request in ledger.unanswered)
    assert refused.startswith("refused: sent -0.50 s after injection 1, ended at 0.00 s, status 503, Retry-After 2: ")
    assert refused.endswith("no engine")
    assert cut.endswith("status None, Retry-After None: reset by peer")
