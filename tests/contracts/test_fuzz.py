"""A short run of `make fuzz`, and proof that it finds what it looks for."""

import asyncio
import socket
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from specray.engine.request_slots import RequestSlots
from specray.server.generation import GenerationEndpoints
from tests.fuzz.files import SUBJECTS, FileFindings, Report, _collect, _outcome, fuzz_files
from tests.fuzz.grammars import fuzz_grammars
from tests.fuzz.http import Findings, fuzz
from tests.support.local_server import until
from tests.support.toy import write_toy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("model"))


def run(model: Path, num_requests: int, seed: int = 1) -> Findings:
    return asyncio.run(fuzz(model, num_requests, seed))


def test_mutated_requests_get_answers(model: Path) -> None:
    findings = run(model, 1000)
    assert not findings.problems
    assert findings.num_requests == 1000
    assert findings.statuses[200] > 50
    assert findings.statuses[400] > 500


def test_mutated_files_are_loaded_or_refused() -> None:
    findings = fuzz_files(15 * len(SUBJECTS), seed=1)
    assert not findings.problems
    assert findings.outcomes["loaded"] > 5
    assert findings.outcomes["refused"] > 50
    assert findings.memory_growth < 256 * 2**20  # most of it is what libraries import when they are first needed


def test_hostile_grammars_are_compiled_or_refused(tmp_path: Path) -> None:
    findings = asyncio.run(fuzz_grammars(tmp_path, 12, seed=1))
    assert not findings.problems
    assert findings.outcomes.total() == 12
    assert sum(count for outcome, count in findings.outcomes.items() if outcome.endswith("refused")) > 3


def test_an_exception_in_a_route_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(GenerationEndpoints, "generate", fail)
    assert any("a server error" in problem for problem in run(model, 60).problems)


def test_a_connection_to_elsewhere_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*_: object) -> None:
        with socket.socket() as opened:
            opened.connect_ex(("127.0.0.1", 9))

    monkeypatch.setattr(GenerationEndpoints, "generate", fetch)
    assert any("connected to ('127.0.0.1', 9)" in problem for problem in run(model, 60).problems)


def test_a_leaked_request_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, lost = RequestSlots.release, []

    def leak_once(slots: RequestSlots, request: Any) -> None:
        release(slots, request)
        if not lost:
            lost.append(slots.free.pop())

    async def check_once(condition: Callable[[], bool]) -> bool:
        return condition() if lost else await until(condition)

    monkeypatch.setattr(RequestSlots, "release", leak_once)
    monkeypatch.setattr("tests.fuzz.http.until", check_once)
    assert any("1 slots not released" in problem for problem in run(model, 60).problems)


def test_an_exception_and_a_crash_of_loading_are_found(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise KeyError("x")

    subject = SUBJECTS[0]._replace(load=fail)
    receiver, sender = Pipe(duplex=False)
    sender.send(Report("first", "loaded"))
    sender.send(Report("slow", "refused", cpu_s=1.5))
    sender.send(Report("second", _outcome(subject, tmp_path)))
    sender.close()
    findings = FileFindings()
    assert _collect(receiver, 0, 10, findings) == 4
    slow, exception, crash = findings.problems
    assert slow == "slow: refused after 1.5 s of CPU time"
    assert exception.startswith("second: KeyError: 'x' at ")
    assert crash == "the process died after second (mutant 3)"
