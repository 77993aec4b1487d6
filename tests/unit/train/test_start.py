import json
from pathlib import Path

import pytest
import torch

from specray.cli.main import main
from specray.train.batches import AnswerFolder
from specray.train.heads import Eagle2Head
from specray.train.settings import TrainSettings
from specray.train.trainer import Trainer
from tests.support.training_data import write_answers

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["eagle3", "eagle2"])
@torch.no_grad()
def test_linear_start_predicts_the_next_final_state(kind: str, tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    folder = AnswerFolder(answers)
    errors = {}
    for start in ("identity", "linear"):
        settings = TrainSettings(kind=kind, tokens=1000, draft_vocab_size=40, dtype="float32", start=start)
        errors[start] = first_error(Trainer(settings, answers, tmp_path / start, CPU), folder)
    # Half of the next state's variance depends on a token that no head knows yet.
    assert errors["linear"] < 0.75 * errors["identity"]


def first_error(trainer: Trainer, folder: AnswerFolder) -> float:
    """Mean squared error of the first prediction of the next final state, on one answer."""
    head, target = trainer.head, trainer._target
    answer = folder[folder.names()[0]][0]
    batch = trainer._collate([answer])
    aux_hidden_states = batch.aux_hidden_states[:, :-2]
    if isinstance(head, Eagle2Head):
        guess = head.fc(torch.cat((target.embed(batch.token_ids[:, 1:-1]), aux_hidden_states), -1))
    else:
        guess = head.outputs(head.enter(aux_hidden_states))
    return float((guess - batch.final[:, 1:-1]).square().mean())


def test_train_command_stops_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, run = write_answers(tmp_path), tmp_path / "run"
    command = [
        "train",
        "eagle2",
        "--answers",
        str(answers),
        "--run",
        str(run),
        "--train-vocab",
        "40",
        "--dtype",
        "float32",
        "--batch-tokens",
        "256",
        "--unroll",
        "1",
        "--threads",
        "1",
    ]
    assert main([*command, "--tokens", "500", "--max-minutes", "0"]) == 0
    assert "run the same command again" in capsys.readouterr().out
    assert main([*command, "--tokens", "500"]) == 0
    assert "done" in capsys.readouterr().out
    assert json.loads((run / "head" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]


def test_missing_answers_are_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["train", "eagle3", "--answers", str(tmp_path / "no"), "--run", str(tmp_path), "--tokens", "1"])
    assert status == 2
    assert "answers.json cannot be read" in capsys.readouterr().err
