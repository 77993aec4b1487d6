"""The report of a GPU, run on a CPU with small sizes."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.__main__ import main


def test_every_kernel_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "check", "--device", "cpu", "--tiny", "--json", str(report)])
    status = main()
    shown = capsys.readouterr().out
    checks = json.loads(report.read_text())["checks"]
    assert len(checks) == 33, shown
    # BLAS, which the interpreter uses, rounds tiles of different heights differently.
    failed = [row["check"] for row in checks if row["passed"] != "yes"]
    assert set(failed) <= {"same bits: in a chunk of a prompt"}, shown
    assert status == int(bool(failed))


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "check"])
    assert main() == 2
    assert "finds no GPU here" in capsys.readouterr().err
