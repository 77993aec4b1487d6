"""The launch commands of SGLang's page on speculative decoding work when the program's name is changed."""

import logging
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from cluster.app import build
from cluster.cli.check import check_document
from cluster.cli.serve import main
from cluster.config import AppConfig
from specray.cli.engine_flags import check_sglang_environment

LINES = [
    line
    for line in (Path(__file__).parents[1] / "data/sglang_commands.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
PROGRAMS = (["python3", "-m", "sglang.launch_server"], ["python", "-m", "sglang.launch_server"], ["sglang", "serve"])


def arguments_of(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments after the program's name; `NAME=value` before it goes to the environment."""
    words = shlex.split(line.replace("<", "").replace(">", ""))  # of placeholders such as <your-model>
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    program = next(program for program in PROGRAMS if words[: len(program)] == program)
    return words[len(program) :]


def accepted(capsys: pytest.CaptureFixture[str], *arguments: str) -> AppConfig:
    assert main([*arguments, "--print-config"]) == 0, capsys.readouterr().err
    (app,) = check_document(yaml.safe_load(capsys.readouterr().out), "printed").values()
    return app


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--print-config"]) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _no_sglang_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_ENABLE_SPEC_V2", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("line", LINES)
def test_every_documented_command_is_accepted(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_of(line, monkeypatch)
    app = accepted(capsys, *arguments)
    values = dict(pairwise(arguments))
    assert app.model == (values.get("--model") or values["--model-path"])
    assert app.speculative.algorithm == values["--speculative-algorithm"]
    assert app.speculative.draft_model_path == values.get("--speculative-draft-model-path")
    assert str(app.speculative.num_draft_tokens) == values["--speculative-num-draft-tokens"]
    assert str(app.mem_fraction_static or None) == str(
        values.get("--mem-fraction-static") or values.get("--mem-fraction")
    )
    assert app.server.log_level == values.get("--log-level", "info")
    build(app)


def test_the_port_of_the_documented_requests_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "30000", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["http_options"]["port"] == 30000


def test_data_parallel_attention_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--enable-dp-attention")
    assert "enable_dp_attention=True is not supported: attention is tensor-parallel within an engine" in error
    assert "set server.num_replicas for data parallelism" in error


def test_options_without_effect_are_logged_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    build(AppConfig())
    assert not caplog.records
    build(AppConfig(trust_remote_code=True))
    assert {record.getMessage() for record in caplog.records} == {
        "accepted without effect: trust_remote_code=True: code from a checkpoint is never run"
    }


@pytest.mark.parametrize(("value", "wanted"), [("True", "false"), ("1", "false"), ("False", "true")])
def test_overlap_is_on_unless_a_flag_turns_it_off(
    value: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", value)
    assert not accepted(capsys).disable_overlap_schedule
    warning = f"SGLANG_ENABLE_SPEC_V2={value} is not applied; set --disable-overlap-schedule {wanted}"
    for is_off in (True, False):
        app = AppConfig(disable_overlap_schedule=is_off)
        expected = [] if is_off == (wanted == "true") else [warning]
        assert list(check_sglang_environment({"SGLANG_ENABLE_SPEC_V2": value}, [app])) == expected


def test_forced_greedy_verification_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "True")
    accepted(capsys)
    error = refused(capsys, "--speculative-algorithm", "NGRAM")
    assert "SGLANG_NGRAM_FORCE_GREEDY_VERIFY=True is not supported: sampled requests would get greedy output" in error


def test_a_switch_that_is_neither_true_nor_false_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "maybe")
    assert "SGLANG_ENABLE_SPEC_V2='maybe' is neither true nor false" in refused(capsys)


def test_other_sglang_variables_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/traces")
    assert main(["--print-config"]) == 0
    assert "warning: SGLANG_TORCH_PROFILER_DIR is set but not read" in capsys.readouterr().err
