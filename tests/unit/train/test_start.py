import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specray.cli.main import main
from specray.train.batches import AnswerFolder
from specray.train.heads import TrainedEagle2Head, TrainedParallelHead
from specray.train.initialization import fit_mask
from specray.train.settings import TrainSettings
from specray.train.trainer import Trainer
from specray.train.unroll import labeled_positions, unroll
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
    if isinstance(head, TrainedEagle2Head):
        guess = head.fc(torch.cat((target.embed(batch.token_ids[:, 1:-1]), aux_hidden_states), -1))
    else:
        guess = head.outputs(head.enter(aux_hidden_states))
    return float((guess - batch.final[:, 1:-1]).square().mean())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_masks_start_by_attending_to_the_last_position(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(
        kind="parallel", tokens=1000, unroll=3, num_layers=num_layers, draft_vocab_size=40, dtype="float32"
    )
    trainer = Trainer(settings, write_answers(tmp_path), tmp_path / "run", CPU)
    head = trainer.head
    assert isinstance(head, TrainedParallelHead)
    for projection in ("q_proj", "k_proj"):  # so that attention is not even, as in a trained head
        head.get_parameter(f"{head.decoder_prefix}self_attn.{projection}.weight").data *= 20
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    weights = [log_weight_of_last(trainer, mask, monkeypatch) for mask in (1, 2)]
    fit_mask(head, trainer._target, trainer._folder, trainer._collate, num_masks=2)
    for mask, weight in zip((1, 2), weights, strict=True):
        assert log_weight_of_last(trainer, mask, monkeypatch) > weight / 2
    changed = [name for name, weight in head.state_dict().items() if not torch.equal(weight, before[name])]
    assert changed == ["mask_hidden"]


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@torch.no_grad()
def test_an_mtp_layer_that_starts_from_an_eagle2_head_predicts_what_it_does(weights: str, tmp_path: Path) -> None:
    answers, source = write_answers(tmp_path), tmp_path / "eagle2"
    settings = TrainSettings(kind="eagle2", tokens=1, draft_vocab_size=40, dtype="float32", weights=weights)
    eagle2 = Trainer(settings, answers, source, CPU)
    torch.manual_seed(3)
    for name, parameter in eagle2.head.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    eagle2._save()
    started = replace(settings, kind="mtp", init_head=str(source / "head"))
    mtp = Trainer(started, answers, tmp_path / "started", CPU)
    without = Trainer(replace(started, init_head=None), answers, tmp_path / "without", CPU)
    wanted = first_outputs(eagle2)
    assert torch.cosine_similarity(first_outputs(mtp), wanted, dim=-1).mean() > 0.95
    assert torch.cosine_similarity(first_outputs(without), wanted, dim=-1).mean() < 0.7


def first_outputs(trainer: Trainer) -> Tensor:
    """What the head predicts for one answer without drafts of its own."""
    batch = trainer._collate([trainer._folder[trainer._folder.names()[0]][0]])
    [step] = unroll(trainer.head, trainer._target, batch, labeled_positions(batch), 1)
    return step.outputs


def test_a_mask_that_was_trained_is_kept(tmp_path: Path) -> None:
    answers, run = write_answers(tmp_path), tmp_path / "first"
    settings = TrainSettings(
        kind="parallel", tokens=500, unroll=3, draft_vocab_size=40, dtype="float32", batch_tokens=256
    )
    first = Trainer(settings, answers, run, CPU)
    first.run()
    second = Trainer(replace(settings, init_head=str(run / "head"), seed=7), answers, tmp_path / "second", CPU)
    mask, kept = first.head.state_dict()["mask_hidden"], second.head.state_dict()["mask_hidden"]
    torch.testing.assert_close(kept, mask, rtol=1e-2, atol=1e-2)  # it was stored in bfloat16


@torch.no_grad()
def log_weight_of_last(trainer: Trainer, mask: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The mean logarithm of the last known position's weight for a mask, in the first layer, over one answer."""
    head, target, folder = trainer.head, trainer._target, trainer._folder
    assert isinstance(head, TrainedParallelHead)
    batch = trainer._collate([folder[folder.names()[0]][0]])
    softmax, weights = torch.Tensor.softmax, []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", lambda *args: weights.append(softmax(*args)) or weights[-1])
        list(head.rollout(target, batch, mask + 1))
    of_mask = weights[mask * head.shape.num_layers]  # [1, kv_heads, group, chains, positions and masks]
    return float(of_mask.diagonal(offset=batch.start, dim1=-2, dim2=-1).log().mean())


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


def test_another_target_than_that_of_the_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = write_answers(tmp_path)
    command = ["train", "eagle2", "--answers", str(answers), "--run", str(tmp_path / "run"), "--tokens", "1"]
    assert main([*command, "--model", "another"]) == 2
    assert f"--model another: the answers in {answers} are those of {tmp_path / 'target'}" in capsys.readouterr().err
