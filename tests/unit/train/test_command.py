"""Options of `specray train` are checked before answers are generated, which may take hours."""

import json
from pathlib import Path

import pytest
import torch

from specray.cli.main import main
from specray.config import EMBEDDED_MODEL
from specray.errors import ConfigError
from specray.train.target import load_target
from tests.support.decoders import write_decoder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a command that would generate answers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hello"}))
    monkeypatch.setattr("specray.train.answers.make_answers", lambda _: pytest.fail("answers are generated"))
    folders = ["--answers", str(tmp_path / "answers"), "--run", str(tmp_path / "run")]
    return [*folders, "--prompts", str(prompts), "--model", EMBEDDED_MODEL, "--tokens", "100"]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("eagle3", ["--init-head", "typo"], "--init-head typo has no model.safetensors"),
        ("eagle3", ["--draft-vocab-size", "100000"], "a draft vocabulary of 100000 does not fit"),
        ("draft", ["--layers", "99"], "--layers 99 does not fit a target of 30 layers"),
        ("parallel", ["--unroll", "1"], "--unroll 1 trains no mask"),
        ("dspark", ["--unroll", "1"], "--unroll 1 is a block of one token"),
        ("eagle3", ["--weight-decay", "0.1", "--optimizer", "adamw"], "is an option of Muon"),
        ("mtp", ["--start", "linear", "--init-head", "x"], "--start linear has no effect with --init-head"),
    ],
)
def test_options_that_no_answers_make_valid_are_refused_at_once(
    kind: str, options: list[str], reason: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", kind, *command, *options]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle3", ["--draft-vocab-size", "64"]), ("draft", ["--train-vocab", "64", "--layers", "2"])],
)
def test_a_target_without_a_native_class_is_refused_at_once(
    kind: str, options: list[str], command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_decoder("qwen3_5", tmp_path)
    reason = "transformers' modules compute it, and heads and draft models are trained for native models"
    assert main(["train", kind, *command, *options, "--model", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err
    with pytest.raises(ConfigError, match=reason):  # with answers that are there already
        load_target(str(tmp_path), torch.float32, torch.device("cpu"), 16)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--total-variation", "1.5"),
        ("--step-decay", "-1"),
        ("--learning-rate", "0"),
        ("--learning-rate", "nan"),
        ("--warmup", "2"),
        ("--self-prompts", "-5"),
        ("--max-bad-rows", "-1"),
        ("--answer-seed", "20240601"),
    ],
)
def test_numbers_out_of_range_are_refused(
    option: str, value: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "eagle3", *command, option, value])
    assert f"argument {option}: " in capsys.readouterr().err
