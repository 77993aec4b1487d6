"""Draft models made of a target's layers: outputs, labels and the exported folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specray.cli.main import main
from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.sampling_params import SamplingParams
from specray.train.batches import AnswerFolder, Collate
from specray.train.draft_model import TrainedDraftModel, kept_layers
from specray.train.shards import TokenSequence, write_shard
from specray.train.target import Target, load_target
from specray.train.unroll import Batch, labeled_positions, unroll
from specray.train.validation import DEPTHS, Validator
from tests.support.engine import make_llm
from tests.support.toy import VOCAB_SIZE, oracle_logits, oracle_states, write_toy
from tests.support.training_data import HIDDEN, write_answers

CPU = torch.device("cpu")
ALL_IDS = torch.arange(VOCAB_SIZE)


def target_at(folder: Path) -> Target:
    return load_target(str(folder), torch.float32, CPU, 128)


def whole(target: Target) -> TrainedDraftModel:
    """A draft model with all of the target's layers."""
    model = TrainedDraftModel(target, ALL_IDS, range(target.shape.num_layers))
    model.start_from(target)
    return model


@pytest.mark.parametrize("variant", ["llama", "tied", "qwen2", "qwen3"])
@torch.no_grad()
def test_draft_model_with_all_layers_equals_the_target(variant: str, tmp_path: Path) -> None:
    target = target_at(write_toy(tmp_path, variant))
    model, rows = whole(target), [[0, 9, 8, 7, 30, 31, 32], [5, 4, 3, 2]]
    token_ids = torch.tensor([rows[0], rows[1] + [0] * 3])
    batch = Batch(
        token_ids, torch.tensor([7, 4]), torch.tensor([2, 1]), torch.zeros(2, 7, 0), torch.zeros(2, 7, HIDDEN)
    )
    for step, states in enumerate(model.rollout(target, batch, 2)):
        for row, tokens in enumerate(rows):
            logits = model.outputs(states[row]) @ model.output_weight.T
            expected = torch.from_numpy(oracle_logits(tmp_path, tokens)).float()[batch.start + 1 + step :]
            torch.testing.assert_close(logits[: len(expected)], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_every_label_is_used_once(tmp_path: Path) -> None:
    target = target_at(write_toy(tmp_path))
    token_ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(5))
    aux_hidden_states, final = torch.zeros(2, 9, 0), torch.randn(2, 9, HIDDEN)
    batch = Batch(token_ids, torch.tensor([9, 7]), torch.tensor([4, 3]), aux_hidden_states, final)
    labeled = labeled_positions(batch)
    model = whole(target)
    [step] = unroll(model, target, batch, labeled, 1)
    assert sorted(step.labels.tolist()) == list(range(len(labeled.final)))
    for output, label in zip(step.outputs, step.labels.tolist(), strict=True):
        [[row, position]] = (labeled.number == label).nonzero().tolist()
        tokens = token_ids[row, : position + 1].tolist()
        expected = torch.from_numpy(oracle_logits(tmp_path, tokens)[-1]).float()
        torch.testing.assert_close(output @ model.output_weight.T, expected, atol=1e-4, rtol=1e-4)


def test_validation_of_a_copy_of_the_target_is_perfect(tmp_path: Path) -> None:
    answers = write_answers(tmp_path, shards=0)
    target = target_at(tmp_path / "target")
    write_shard(answers, [a_true_sequence(target.folder, index) for index in range(300)])
    collate = Collate(slice(0, 0), HIDDEN, 128, torch.float32, CPU)
    validator = Validator(AnswerFolder(answers), target, collate)
    figures = validator(whole(target))
    assert figures is not None
    assert figures.accept_length > 0.97 * (1 + DEPTHS)  # answers are stored in bfloat16
    half = TrainedDraftModel(target, ALL_IDS, [0])
    half.start_from(target)
    worse = validator(half)
    assert worse is not None
    assert worse.accept_length < 0.8 * figures.accept_length


def a_true_sequence(target: Path, index: int) -> TokenSequence:
    tokens = torch.randint(2, VOCAB_SIZE, (14,), generator=torch.Generator().manual_seed(index)).tolist()
    aux_hidden_states = torch.zeros(14, 4 * HIDDEN)
    aux_hidden_states[:-1, -HIDDEN:] = torch.from_numpy(oracle_states(target, tokens)[-1][:-1]).float()
    return TokenSequence(tokens, 3, aux_hidden_states.bfloat16(), index)


def test_train_draft_makes_a_folder_that_loads_as_a_model_and_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, run = write_answers(tmp_path), tmp_path / "run"
    command = [
        "train",
        "draft",
        "--answers",
        str(answers),
        "--run",
        str(run),
        "--layers",
        "1",
        "--train-vocab",
        "40",
        "--dtype",
        "float32",
        "--batch-tokens",
        "256",
        "--threads",
        "1",
        "--tokens",
        "600",
    ]
    assert main([*command, "--max-minutes", "0"]) == 0
    assert "run the same command again" in capsys.readouterr().out
    assert main(command) == 0
    assert "done: the model is in" in capsys.readouterr().out

    target, made = tmp_path / "target", run / "head"
    tensors, theirs = load_file(made / "model.safetensors"), load_file(target / "model.safetensors")
    assert tensors.keys() == {name for name in theirs if not name.startswith("model.layers.1.")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(tensors[name], theirs[name].bfloat16())
    trained = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(tensors[trained], theirs[trained].bfloat16())
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 1
    assert "Draft model for" in (made / "README.md").read_text()

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with make_llm(made) as llm:
        assert len(llm.generate([[0, 9, 8]], params)[0].choices[0].token_ids) == 12
    speculative = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(made))
    with make_llm(target) as plain, make_llm(target, speculative=speculative) as drafted:
        [expected], [got] = (llm.generate([[0, 9, 8]], params) for llm in (plain, drafted))
    assert got.choices[0].token_ids == expected.choices[0].token_ids
    assert got.choices[0].usage is not None
    assert got.choices[0].usage.num_draft_tokens > 10


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [("1", [0]), ("2", [0, 29]), ("4", [0, 10, 19, 29]), ("30", list(range(30))), ("0,1, 29", [0, 1, 29])],
)
def test_layers_option_is_a_number_or_a_list(wanted: str, layers: list[int]) -> None:
    assert kept_layers(wanted, 30) == layers


@pytest.mark.parametrize("wanted", ["", "0", "31", "a", "1,30", "2,1", "1,1", "1,", "-1"])
def test_invalid_layers_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"--layers.*give"):
        kept_layers(wanted, 30)
