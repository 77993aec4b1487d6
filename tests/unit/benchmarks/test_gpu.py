"""The report of a GPU, run on a CPU with small sizes."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import results
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, kernels, overlap, placement, served, speed
from benchmarks.gpu.report import Report
from specray.worker.remote_drafter import source
from tests.support.graph_stand_in import recorded_graphs

CPU = torch.device("cpu")


def shown(found: Report, headers: list[str]) -> list[list[str]]:
    places = [found.headers.index(name) for name in headers]
    return [[row[place] for place in places] for row in found.rows]


def test_every_kernel_is_checked() -> None:
    found = checks.report(CPU, is_tiny=True)
    assert len(found.rows) == 57
    # BLAS, which the interpreter uses, rounds tiles of different heights differently.
    failed = [name for name, passed in shown(found, ["check", "passed"]) if passed != "yes"]
    assert set(failed) <= {"same bits: in a chunk of a prompt"}
    assert found.num_failed == len(failed)
    assert found.cells[0].value == 1 - len(failed) / 57


def test_the_speed_of_decode_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in for graphs. The accept lengths are those that are simulated, as far as chains reach."""
    monkeypatch.setattr(speed, "WARM_UP", 1)
    with recorded_graphs() as graphs:
        found = speed.report(CPU, is_tiny=True)
    assert shown(found, ["variant", "launched", "requests"]) == [
        [name, launched, size]
        for name in ("plain", "tree of 6, 2.9")
        for launched in ("eager", "graphs")
        for size in ("1", "2")
    ]
    for name, tokens_per_s, per_step in shown(found, ["variant", "tokens/s", "tokens a step"]):
        assert float(tokens_per_s) > 0
        assert float(per_step) == 1 if name == "plain" else 2 <= float(per_step) <= 4
    [goal] = [goal for (goal,) in shown(found, ["goal"]) if goal]
    assert goal in (">= 230", ">= 230 (missed)")  # the machine decides
    assert len(graphs) == 2
    assert all({kind for kind, *_ in each.replayed} >= {"forward", "verify"} for each in graphs)
    rows = [(cell.row, cell.column) for cell in found.cells]
    assert ("plain, kernels launched one by one", "1 request") in rows
    assert ("tree of 6, 2.9 tokens a step", "2 requests") in rows
    assert len(set(rows)) == len(rows) == 3 * 2
    assert [cell.goal for cell in found.cells if cell.goal] == [230]


def test_the_time_of_every_kernel_is_measured() -> None:
    """In the interpreter times mean nothing; each call works, and has a rate beside the ceilings'."""
    found = kernels.report(CPU, is_tiny=True)
    names = [row[0] for row in found.rows]
    assert names[:2] == ["ceiling: copy", "ceiling: product"]
    for kernel in ("fixed order", "attention", "norm", "gated", "rotary", "greedy", "sampled", "top-p", "compaction"):
        assert kernel in " ".join(names)
    assert all(float(microseconds) > 0 for (microseconds,) in shown(found, ["us"]))
    assert [cell.row for cell in found.cells] == [
        "copy, TB/s",
        "product of 32 squared, TFLOPS",
        "deterministic products / torch's, time, 1 row",
        "deterministic products / torch's, time, 20 rows",
    ]


def test_steps_are_measured_as_they_are_served() -> None:
    """With the rank in this process and in another one, and its drafter in a third one."""
    found = served.report(CPU, is_tiny=True)
    places = [(variant.name, place) for variant in served.TINY.variants for place in served.PLACES]
    assert [(cell.row.partition(",")[0], cell.column) for cell in found.cells] == [
        place for place in places if place != ("plain", served.PLACES[2])
    ]
    assert all(cell.value > 0 for cell in found.cells)


def test_steps_with_two_plans_in_flight_are_measured() -> None:
    found = overlap.report(CPU, is_tiny=True)
    assert shown(found, ["variant", "plans in flight"]) == [
        [name, plans] for name in ("plain", "chain of 3") for plans in ("1", "2")
    ]
    assert [(cell.column, cell.goal) for cell in found.cells] == [("one plan", None), ("two plans in flight", 1.03)] * 2
    assert all(cell.value > 0 for cell in found.cells)


def test_drafters_in_other_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The separate one needs a second GPU."""
    for wait in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 60.0)  # long enough for a busy machine
    found = placement.report(CPU, is_tiny=True)
    inline, colocated, separate = shown(found, ["drafter", "tokens/s", "tokens a step"])
    assert [inline[0], colocated[0], separate[:2]] == ["inline", "colocated", ["separate", "no second GPU"]]
    assert float(inline[2]) == float(colocated[2]) > 2
    assert [(cell.row, cell.column) for cell in found.cells] == [
        ("inline", "2 requests"),
        ("colocated", "2 requests"),
    ]


def test_figures_are_saved_as_those_of_make_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    found = checks.Report(["check"], [["a"]], 1, "", [checks.Cell("Checks", "a", "measured", 1.0, "{:.0%}", 1.0)])
    monkeypatch.setattr(checks, "report", lambda *_: found)
    assert gpu.main(["check", "--device", "cpu", "--machine", "A GPU", "--tiny"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert gpu.main(["check", "--device", "cpu", "--machine", "A GPU"]) == 0
    [file] = results.load()["A GPU"]
    assert [(result.key, result.value, result.goal) for result in file.results] == [
        (("Checks", "a", "measured"), 1.0, 1.0)
    ]
    assert "saved in" in capsys.readouterr().out


def test_checks_that_fail_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "report", lambda *_: Report(["check"], [["a"]], 1, "", [], num_failed=1))
    assert gpu.main(["check", "--device", "cpu", "--tiny"]) == 1


def test_a_machine_without_a_gpu_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["check"]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu.main(["check", "--device", "cpu", "--tiny"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
