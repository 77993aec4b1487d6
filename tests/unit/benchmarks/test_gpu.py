"""The report of a GPU, run on a CPU with small sizes."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.__main__ import main
from specray.worker.remote_drafter import source
from tests.support.graph_stand_in import recorded_graphs


def test_every_kernel_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "check", "--device", "cpu", "--tiny", "--json", str(report)])
    status = main()
    shown = capsys.readouterr().out
    checks = json.loads(report.read_text())["checks"]
    assert len(checks) == 57, shown
    # BLAS, which the interpreter uses, rounds tiles of different heights differently.
    failed = [row["check"] for row in checks if row["passed"] != "yes"]
    assert set(failed) <= {"same bits: in a chunk of a prompt"}, shown
    assert status == int(bool(failed))


def test_the_speed_of_decode_steps_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the stand-in for graphs. The accept lengths are those that are simulated, as far as chains reach."""
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "speed", "--device", "cpu", "--tiny", "--json", str(report)])
    with recorded_graphs() as graphs:
        assert main() == 0
    speeds = json.loads(report.read_text())["speeds"]
    shown = capsys.readouterr().out
    assert [(each["variant"]["name"], each["in_graphs"], each["batch_size"]) for each in speeds] == [
        (name, in_graphs, size)
        for name in ("plain", "chain of 3", "tree of 6")
        for in_graphs in (False, True)
        for size in (1, 2)
    ], shown
    assert all(
        each["tokens_per_s"] > 0 and 1 <= each["tokens_per_step"] <= each["variant"]["chain"] + 1 for each in speeds
    )
    assert all(each["tokens_per_step"] > 2 for each in speeds if each["variant"]["chain"]), shown
    assert shown.count(">= 230") == 2  # when it is measured, and in the table
    assert len(graphs) == 3
    assert all({kind for kind, *_ in each.replayed} >= {"forward", "verify"} for each in graphs)


def test_the_time_of_every_kernel_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the interpreter times mean nothing; each call works, and has a rate beside the ceilings'."""
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "kernels", "--device", "cpu", "--tiny", "--json", str(report)])
    assert main() == 0
    measured = json.loads(report.read_text())["kernels"]
    assert [each["name"] for each in measured[:2]] == ["ceiling: copy", "ceiling: product"]
    names = " ".join(each["name"] for each in measured)
    for kernel in ("fixed order", "attention", "norm", "gated", "rotary", "greedy", "sampled", "top-p", "compaction"):
        assert kernel in names
    assert all(each["seconds"] > 0 and each["gigabytes_per_s"] > 0 for each in measured)
    assert len(capsys.readouterr().out.splitlines()) >= len(measured) + 2


def test_steps_with_two_plans_in_flight_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "overlap", "--device", "cpu", "--tiny", "--json", str(report)])
    assert main() == 0
    found = json.loads(report.read_text())["overlaps"]
    assert [(each["variant"], each["num_plans"]) for each in found] == [
        (name, plans) for name in ("plain", "chain of 3") for plans in (1, 2)
    ]
    assert all(each["tokens_per_s"] > 0 and each["rank_ms"] > 0 for each in found)
    assert capsys.readouterr().out.count("<= 1.03") == 2


def test_drafters_in_other_processes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The separate one needs a second GPU."""
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "placement", "--device", "cpu", "--tiny", "--json", str(report)])
    for wait in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 60.0)  # long enough for a busy machine
    assert main() == 0
    inline, colocated, separate = json.loads(report.read_text())["placements"]
    assert [each["placement"] for each in (inline, colocated, separate)] == ["inline", "colocated", "separate"]
    assert inline["tokens_per_step"] == colocated["tokens_per_step"] > 2
    assert separate["tokens_per_s"] is None
    assert "no second GPU" in capsys.readouterr().out


def test_a_machine_without_a_gpu_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "check"])
    assert main() == 2
    assert "finds no GPU here" in capsys.readouterr().err


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "check", "--device", "cpu", "--tiny"])
    assert main() == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
