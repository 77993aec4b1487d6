"""The report of a GPU, run on a CPU with small sizes."""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import results
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, depths, environment, heads, kernels, part, placement, served, served_on_ray, speed
from benchmarks.gpu.report import Cell, Checkpoints, Order, Report, TimeLimit
from cluster.config import AppConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.worker.remote_drafter import source
from tests.support.graph_stand_in import recorded_graphs
from tests.support.heads import write_random_head

CPU = torch.device("cpu")
TINY = Order("a part", CPU, is_tiny=True, folder=Path("nowhere"), time_limit=TimeLimit())
TINY_ARGUMENTS = ["--device=cpu", "--model=tiny"]


def shown(found: Report, headers: list[str]) -> list[list[str]]:
    places = [found.headers.index(name) for name in headers]
    return [[row[place] for place in places] for row in found.rows]


def test_every_kernel_is_checked() -> None:
    found = checks.report(TINY)
    assert len(found.rows) == 60
    # BLAS, which the interpreter uses, rounds tiles of different heights differently. The interpreter does not round
    # bfloat16 as a GPU does.
    failed = [name for name, passed in shown(found, ["check", "passed"]) if passed != "yes"]
    assert set(failed) <= {"same bits: in a chunk of a prompt", "same bits: add and norm in one launch"}
    assert found.num_failed == len(failed)
    assert found.cells[0].value == 1 - len(failed) / 60


def test_the_speed_of_decode_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in for graphs. The accept lengths are those that are simulated, as far as chains reach."""
    monkeypatch.setattr(speed, "WARM_UP", 1)
    with recorded_graphs() as graphs:
        found = speed.report(TINY)
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
    found = kernels.report(TINY)
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
    found = served.report(TINY)
    places = [(variant.name, place) for variant in served.TINY.variants for place in served.PLACES]
    assert [(cell.row.partition(",")[0], cell.column) for cell in found.cells] == [
        place for place in places if place != ("plain", served.PLACES[2])
    ]
    assert all(cell.value > 0 for cell in found.cells)


def test_drafters_in_other_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The separate one needs a second GPU."""
    for wait in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 60.0)  # long enough for a busy machine
    found = placement.report(TINY)
    inline, few, colocated, few_beside, separate = shown(found, ["drafter", "tokens/s", "tokens a step"])
    assert [inline[0], colocated[0], separate[:2]] == ["inline", "colocated", ["separate", "no second GPU"]]
    assert float(inline[2]) == float(colocated[2]) > float(few[2]) == float(few_beside[2]) > 1
    names = ["inline", "inline, up to 1 drafted", "colocated", "colocated, up to 1 drafted"]
    assert [(cell.row, cell.column) for cell in found.cells] == [(name, "2 requests") for name in names]


def test_the_gain_of_chains_is_that_over_as_many_plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "WARM_UP", 1)
    with recorded_graphs():
        found = depths.report(TINY)
    (plain, drafted), (chain, best) = shown(found, ["chain", "gain"]), found.cells
    assert plain == ["plain", "1.00"]
    assert drafted[1] == f"{chain.value:.2f}"
    one, two = (
        speed.Speed(variant, True, 2, rate, 1.0, 1.0, None, None)
        for variant, rate in ((speed.VARIANTS[0], 2.0), (speed.VARIANTS[1], 3.0))
    )
    assert depths.gain(two, [one, two]) == 1.5
    assert (best.row, best.column, best.value) == ("best length", "2 requests", chain.value)


def test_a_best_length_is_not_among_lengths_that_were_not_all_measured() -> None:
    found = [
        speed.Speed(variant, True, 64, rate, 1.0, 1.0, None, None)
        for variant, rate in zip(depths.CHAINS[:3], (2.0, 3.0, 4.0), strict=True)
    ]
    lengths = [each.variant.title for each in found[1:]]
    assert [cell.row for cell in depths._cells(128, found, 3)] == lengths
    assert [cell.row for cell in depths._cells(128, found, 2)] == [*lengths, "best length"]


@pytest.mark.parametrize("names", [["ceiling: copy"], ["ceiling: product"], ["fixed order product, 1 rows"]])
def test_limits_of_a_device_that_were_measured_before_the_end_are_kept(names: list[str]) -> None:
    found = [kernels.Measurement(name, 1.0, 1.0, 1.0) for name in names]
    assert len(kernels.cells(found, kernels.SMALL)) == sum("ceiling" in name for name in names)


def test_the_environment_is_shown() -> None:
    assert ["torch", torch.__version__.partition("+")[0]] in [
        [name, value.partition("+")[0]] for name, value in environment.report(TINY).rows
    ]


def test_heads_of_a_checkpoint_are_measured_beside_plain_decoding(toy: Path, tmp_path: Path) -> None:
    second, third = (str(write_random_head(tmp_path / f"{number}", toy, number)) for number in (2, 3))
    found = heads.report(TINY._replace(checkpoints=Checkpoints(str(toy), second, third, None)))
    assert [row[0] for row in found.rows] == ["plain", "EAGLE-2", "EAGLE-3"]
    assert [row[4] for row in found.rows] == ["100%"] * 3
    assert all(cell.goal is None for cell in found.cells), "the page's figures are those of MT-bench"
    with pytest.raises(ConfigError, match="--target"):
        heads.report(TINY)


@pytest.mark.parametrize("placement", ["colocated", "memory"])
def test_servers_are_measured_with_the_checkpoint_that_is_made_for_them(placement: str, tmp_path: Path) -> None:
    """A part of the program: `--parts servers` starts Ray."""
    order = TINY._replace(part=f"serve-{placement}-chain", folder=tmp_path)
    setting = served_on_ray.TINY
    config = served_on_ray._config(order, setting, setting.variants["chain"], placement)
    app = AppConfig.model_validate(config["applications"][0]["args"])
    assert app.has_draft_actor
    assert app.draft.cuda_ipc == (placement == "memory")
    with LLM(model=app.model, dtype="float32", device="cpu", speculative=app.speculative) as llm:
        [generation] = llm.generate([[2, 3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert generation.choices[0].text.startswith(" w"), "each token has a word"
    inline = Report([], [], 1, "", [Cell("", "", "tokens/s, 1 request", 50.0)])
    part.Finding("abc", "a GPU", inline).write(tmp_path / "serve-inline-chain.json")
    [ratio] = served_on_ray._beside_inline(order, placement, 1, 48.0)
    assert (ratio.value, ratio.goal) == (0.96, 0.95)


class Parts:
    """Runs of parts in this process, with the times that they had."""

    def __init__(self, found: Report) -> None:
        self.found, self.runs = found, list[str]()

    def run(self, name: str, arguments: list[str], limit_s: float) -> None:
        if limit_s > 0:
            self.runs.append(name)
            part.main([name, *arguments])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    cell = Cell("Checks", "a", "measured", 1.0, "{:.0%}", 1.0)
    parts = Parts(Report(["check"], [["a"]], 1, "a note", [cell]))
    for module in (checks, environment):
        monkeypatch.setattr(module, "report", lambda _: parts.found)
    monkeypatch.setattr(gpu, "_run", parts.run)
    monkeypatch.setattr(gpu, "commit_here", lambda: "abc+")
    monkeypatch.setattr(results, "commit_here", lambda: "abc+")
    return parts


def test_a_part_is_not_repeated_on_the_same_machine_at_the_same_commit(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--parts=environment,check", f"--out={tmp_path}", *TINY_ARGUMENTS]
    assert gpu.main([*arguments, "--minutes=0"]) == 1
    assert parts.runs == []
    assert "not measured whole, or with failed checks: environment, check" in capsys.readouterr().err
    for _ in range(2):
        assert gpu.main(arguments) == 0
        assert parts.runs == ["environment", "check"]
    assert "Checks: a" in capsys.readouterr().out
    assert gpu.main([*arguments, "--again"]) == 0
    assert len(parts.runs) == 4
    (tmp_path / "check.json").write_text("{")  # a part that was killed while it wrote
    monkeypatch.setattr(gpu, "commit_here", lambda: "abc")
    assert gpu.main(arguments) == 0
    assert parts.runs[4:] == ["check"]
    monkeypatch.setattr(gpu, "commit_here", lambda: "def")
    gpu.main(arguments)
    assert parts.runs[5:] == ["environment", "check"]


@pytest.mark.usefixtures("parts")
def test_figures_are_saved_as_those_of_make_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    arguments = ["--parts=check", "--device=cpu", "--machine=A GPU", f"--out={tmp_path / 'out'}"]
    assert gpu.main([*arguments, "--model=tiny"]) == 0
    assert not results.RESULTS.exists()
    assert gpu.main([*arguments, "--again"]) == 0
    [file] = results.load()["A GPU"]
    assert [(result.key, result.value, result.goal) for result in file.results] == [
        (("Checks", "a", "measured"), 1.0, 1.0)
    ]
    assert "saved in" in capsys.readouterr().out


def test_checks_that_fail_are_status_1(parts: Parts, tmp_path: Path) -> None:
    parts.found = parts.found._replace(num_failed=1)
    assert gpu.main(["--parts=check", f"--out={tmp_path}", *TINY_ARGUMENTS]) == 1


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu._run("environment", [f"--out={tmp_path}", *TINY_ARGUMENTS], 0.01)
    assert "environment: ended after 0 s" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_part_that_is_ended_keeps_what_it_has_measured_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*_: object) -> Iterator[dict[str, str]]:
        yield dict.fromkeys(checks.HEADERS, "yes")
        os.kill(os.getpid(), signal.SIGTERM)
        yield dict.fromkeys(checks.HEADERS, "too late")

    monkeypatch.setattr(checks, "check", check)
    arguments, before = [f"--out={tmp_path}", *TINY_ARGUMENTS], signal.getsignal(signal.SIGTERM)
    assert part.main(["check", *arguments]) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    found = part.Finding.read(tmp_path / "check.json")
    assert found is not None
    assert not found.is_whole
    assert [row[-1] for row in found.report.rows] == ["yes"]
    assert found.report.cells[0].value == 1 / 60
    assert "OUT OF TIME" in capsys.readouterr().out
    runs: list[str] = []
    monkeypatch.setattr(gpu, "_run", lambda name, *_: runs.append(name))
    assert gpu.main(["--parts=check", *arguments]) == 1
    assert runs == ["check"]


def test_a_part_that_is_ended_while_it_prints_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = speed.Speed(speed.VARIANTS[0], True, 2, 1.0, 1.0, 1.0, None, None)

    def interrupted(_: object) -> list[list[str]]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [["plain"] * len(speed.HEADERS)]

    monkeypatch.setattr(speed, "measure", lambda *_: iter([measured, measured]))
    monkeypatch.setattr(speed, "table_rows", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert part.main(["speed", f"--out={tmp_path}", *TINY_ARGUMENTS]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    found = part.Finding.read(tmp_path / "speed.json")
    assert found is not None
    assert not found.is_whole
    assert len(found.report.cells) == 1


def test_the_parts_fit_into_the_time_of_a_lease() -> None:
    assert sum(each.limit_s for each in gpu.ALONE.values()) <= 12 * 60
    assert gpu._parts("speed,servers") == ["speed", *gpu.SERVERS]
    with pytest.raises(argparse.ArgumentTypeError, match="sped: choose from servers, environment, check"):
        gpu._parts("sped")


def test_a_machine_without_a_gpu_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu.main(TINY_ARGUMENTS) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
