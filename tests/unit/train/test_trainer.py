import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.errors import ConfigError
from specray.models.heads.eagle_files import HeadConfig
from specray.train.learner import Learner
from specray.train.run_files import read_log
from specray.train.settings import TrainSettings
from specray.train.shards import write_shard
from specray.train.trainer import Trainer
from tests.support.toy import EOS, VOCAB_SIZE
from tests.support.training_data import HIDDEN, a_sequence, write_answers

CPU = torch.device("cpu")


def settings(**over: Any) -> TrainSettings:
    options = {
        "kind": "eagle3",
        "tokens": 2000,
        "unroll": 2,
        "draft_vocab_size": 40,
        "batch_tokens": 256,
        "dtype": "float32",
        "validate_every": 10_000,
    }
    return TrainSettings(**{**options, **over})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(run / "checkpoint.pt", weights_only=True)["head"])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "eagle3"},
        {"kind": "parallel"},
        {"kind": "dspark", "markov_rank": 4},
        {"kind": "eagle2"},
        {"kind": "mtp"},
        {"kind": "draft", "layers": "1"},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_a_stopped_run_ends_with_the_weights_of_an_uninterrupted_one(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    answers = write_answers(tmp_path, sequences=16)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert Trainer(settings(**options), answers, whole, CPU).run()

    learn = Learner.learn

    def learn_and_interrupt(self: Learner, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return learn(self, *args)

    monkeypatch.setattr(Learner, "learn", learn_and_interrupt)
    for _ in range(2):  # also in a run that has itself been resumed
        with pytest.raises(KeyboardInterrupt):
            Trainer(settings(**options), answers, stopped, CPU).run()
    monkeypatch.undo()
    assert Trainer(settings(**options), answers, stopped, CPU).run()

    expected, got = weights(whole), weights(stopped)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_tiny_head_overfits_its_data(tmp_path: Path) -> None:
    answers = write_answers(tmp_path, sequences=4)
    trainer = Trainer(
        settings(tokens=40_000, learning_rate=5e-3, draft_vocab_size=VOCAB_SIZE), answers, tmp_path / "run", CPU
    )
    assert trainer.run()
    figures = torch.stack(trainer._recent)[-1]
    assert figures[1] > 0.9
    assert figures[2] > 0.9


def test_max_minutes_stops_with_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    assert not Trainer(settings(max_minutes=0.0), answers, tmp_path / "run", CPU).run()
    assert (tmp_path / "run" / "checkpoint.pt").is_file()
    assert Trainer(settings(), answers, tmp_path / "run", CPU).run()


@pytest.mark.usefixtures("draws_plots")
@pytest.mark.parametrize("options", [{"kind": "eagle3"}, {"kind": "draft", "layers": "1"}], ids=str)
def test_files_of_a_run_follow_the_umask(options: dict[str, str], tmp_path: Path) -> None:
    Trainer(settings(tokens=64, **options), write_answers(tmp_path), tmp_path / "run", CPU).run()
    os.umask(umask := os.umask(0))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_eagle3_is_exported_in_the_public_layout(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(settings(), write_answers(tmp_path), run, CPU).run()
    tensors = load_file(run / "head" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        **{f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)},
        **{
            f"midlayer.{name}.weight": (HIDDEN,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (40, HIDDEN),
        "d2t": (40,),
        "t2d": (VOCAB_SIZE,),
    }
    assert tensors["d2t"].dtype is torch.int64
    assert tensors["t2d"].dtype is torch.bool
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert EOS in ids.tolist()

    config = json.loads((run / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 40
    assert config["fc_norm"] is True
    # The answers record the inputs of layers 0, 1, 1, which are the outputs of the layers before.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 0]
    card = (run / "head" / "README.md").read_text()
    assert "EAGLE-3 draft head" in card
    assert "learning rate: 0.001" in card


def test_a_parallel_head_starts_from_an_eagle3_head_and_is_exported_with_its_mask(tmp_path: Path) -> None:
    answers, first, second = write_answers(tmp_path), tmp_path / "eagle3", tmp_path / "parallel"
    made = Trainer(settings(intermediate_size=24), answers, first, CPU)
    made.run()
    trainer = Trainer(settings(kind="parallel", init_head=str(first / "head")), answers, second, CPU)
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight", "lm_head.weight"):
        expected = made.head.get_parameter(name).bfloat16().float()
        torch.testing.assert_close(trainer.head.get_parameter(name), expected, msg=name)
    trainer.run()
    config = json.loads((second / "head" / "config.json").read_text())
    assert (config["parallel_drafting"], config["ptd_token_id"]) == (True, EOS)
    tensors = load_file(second / "head" / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 3 * HIDDEN)
    assert HeadConfig.read(second / "head").ptd_token_id == EOS


def test_the_width_of_an_initial_head_is_not_changed(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(intermediate_size=24), answers, tmp_path / "run", CPU).run()
    head = str(tmp_path / "run" / "head")
    with pytest.raises(ConfigError, match=r"--intermediate-size 48: the feed-forward of .* is 24 wide; leave"):
        Trainer(settings(init_head=head, intermediate_size=48), answers, tmp_path / "next", CPU)


def test_a_run_resumes_without_the_head_that_it_began_with(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(intermediate_size=24), answers, tmp_path / "first", CPU).run()
    second = settings(init_head=str(tmp_path / "first" / "head"))
    Trainer(second, answers, tmp_path / "second", CPU).run()
    shutil.rmtree(tmp_path / "first")
    resumed = Trainer(second, answers, tmp_path / "second", CPU)
    assert resumed.head.shape.ffn_size == 24


def test_what_was_logged_after_the_last_checkpoint_is_removed_when_a_run_resumes(tmp_path: Path) -> None:
    """The process was killed, maybe within a line."""
    answers, run = write_answers(tmp_path), tmp_path / "run"
    Trainer(settings(), answers, run, CPU).run()
    kept = (run / "log.jsonl").read_text()
    later = json.dumps(json.loads(kept.splitlines()[-1]) | {"tokens": 10**9})
    (run / "log.jsonl").write_text(kept + later + "\n" + later[:20])
    Trainer(settings(), answers, run, CPU)
    assert (run / "log.jsonl").read_text() == kept


def test_a_new_run_does_not_continue_the_log_of_one_that_was_killed_early(tmp_path: Path) -> None:
    answers, run = write_answers(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text('{"tokens": 100, "validation": {"accept_length": 9.0}}\n')
    Trainer(settings(), answers, run, CPU)
    assert read_log(run) == []


@pytest.mark.parametrize("bias", [False, True])
def test_eagle2_is_exported_without_the_targets_head(bias: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(settings(kind="eagle2", bias=bias), write_answers(tmp_path), run, CPU).run()
    tensors = load_file(run / "head" / "model.safetensors")
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert ("fc.bias" in tensors) == bias
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & tensors.keys()
    config = json.loads((run / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["bias"] is bias


def test_init_head_loads_its_weights(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    first = Trainer(settings(), answers, tmp_path / "run", CPU)
    first.run()
    head = str(tmp_path / "run" / "head")
    second = Trainer(settings(init_head=head, draft_vocab_size=30), answers, tmp_path / "next", CPU)
    torch.testing.assert_close(second.head.fc.weight, first.head.fc.weight.bfloat16().float())
    place = {token: row for row, token in enumerate(first.head.draft_ids.tolist())}
    rows = [place[token] for token in second.head.draft_ids.tolist()]
    torch.testing.assert_close(second.head.output_weight, first.head.output_weight[rows].bfloat16().float())


def test_layers_on_top_of_an_initial_head_start_as_the_identity(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    first = Trainer(settings(), answers, tmp_path / "first", CPU)
    first.run()
    options = settings(init_head=str(tmp_path / "first" / "head"), num_layers=2)
    second = Trainer(options, answers, tmp_path / "second", CPU)
    below, above = first.head.state_dict(), second.head.state_dict()
    for name in ("self_attn.q_proj", "mlp.down_proj", "hidden_norm"):
        expected = below[f"midlayer.{name}.weight"].bfloat16().float()
        torch.testing.assert_close(above[f"layers.0.{name}.weight"], expected)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert above[f"layers.1.{name}.weight"].abs().max() < 0.02
    second.run()
    folder = tmp_path / "second" / "head"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    third = Trainer(settings(init_head=str(folder), num_layers=2), answers, tmp_path / "third", CPU)
    for name, tensor in second.head.state_dict().items():
        torch.testing.assert_close(third.head.state_dict()[name].float(), tensor.bfloat16().float())


def test_initial_head_with_more_layers_is_refused(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(num_layers=2), answers, tmp_path / "first", CPU)._save()
    with pytest.raises(ConfigError, match="has 2 layers, more than --num-layers 1; set --num-layers 2"):
        Trainer(settings(init_head=str(tmp_path / "first" / "head")), answers, tmp_path / "second", CPU)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_initial_head_without_its_layer_is_refused(num_layers: int, tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(), answers, tmp_path / "first", CPU)._save()
    path = tmp_path / "first" / "head" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "midlayer" not in name}, path)
    with pytest.raises(ConfigError, match="is missing"):
        Trainer(settings(init_head=str(path.parent), num_layers=num_layers), answers, tmp_path / "second", CPU)


def test_output_rows_of_new_ids_are_mapped_like_the_trained_ones(tmp_path: Path) -> None:
    """The target's own rows have another scale than trained ones and would get higher logits."""
    answers = write_answers(tmp_path)
    first = Trainer(settings(draft_vocab_size=HIDDEN + 8), answers, tmp_path / "run", CPU)
    turn = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first.head.lm_head.weight.copy_(first.head.lm_head.weight @ turn)  # type: ignore[operator,union-attr]
    first._save()
    head = str(tmp_path / "run" / "head")
    second = Trainer(settings(init_head=head, draft_vocab_size=VOCAB_SIZE), answers, tmp_path / "next", CPU)
    expected = load_target_rows(second) @ turn
    torch.testing.assert_close(second.head.output_weight, expected, atol=0.1, rtol=0.05)  # stored in bfloat16


def load_target_rows(trainer: Trainer) -> torch.Tensor:
    return trainer._target.head[trainer.head.draft_ids].float()


def test_checkpoint_of_other_answers_is_refused(tmp_path: Path) -> None:
    Trainer(settings(), write_answers(tmp_path), tmp_path / "run", CPU).run()
    other = tmp_path / "other"
    other.mkdir()
    answers = write_answers(other)
    description = json.loads((answers / "answers.json").read_text())
    (answers / "answers.json").write_text(json.dumps(description | {"seed": 99}))
    with pytest.raises(ConfigError, match=r"seed differ.*--init-head"):
        Trainer(settings(), answers, tmp_path / "run", CPU)


@pytest.mark.usefixtures("draws_plots")
def test_validation_is_logged_and_plotted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(settings(validate_every=500), write_answers(tmp_path, sequences=150), run, CPU).run()
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert len(lines) >= 4
    figures = lines[-1]["validation"]
    assert figures["num_sequences"] >= 1
    assert figures["accept_length"] == pytest.approx(1 + sum(figures["accepted"]), abs=1e-3)
    assert (run / "plot.png").stat().st_size > 1000
    assert "| depth |" in (run / "head" / "README.md").read_text()


def test_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(), answers, tmp_path / "run", CPU).run()
    with pytest.raises(ConfigError, match="kind='eagle3'"):
        Trainer(settings(kind="eagle2"), answers, tmp_path / "run", CPU)


def test_checkpoint_with_other_names_is_refused(tmp_path: Path) -> None:
    answers, path = write_answers(tmp_path), tmp_path / "run" / "checkpoint.pt"
    Trainer(settings(), answers, path.parent, CPU).run()
    content = torch.load(path, weights_only=True)
    content["head"]["proj.weight"] = content["head"].pop("fc.weight")
    torch.save(content, path)
    with pytest.raises(ConfigError, match=r"another version of the trainer .*fc\.weight.*--init-head"):
        Trainer(settings(), answers, path.parent, CPU)


def test_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(), answers, tmp_path / "run", CPU).run()
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"cannot be read as plain tensors .*delete it to start again"):
        Trainer(settings(), answers, tmp_path / "run", CPU)


@pytest.mark.parametrize(
    "changes",
    [{"norm_output": True}, {"layer_types": ["sliding_attention"], "sliding_window": 2048}],
)
def test_init_head_with_settings_that_are_not_trained_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(), answers, tmp_path / "first", CPU)._save()
    config = tmp_path / "first" / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=rf"--init-head .*{next(iter(changes))}"):
        Trainer(settings(init_head=str(config.parent)), answers, tmp_path / "second", CPU)


def test_run_with_init_head_continues_its_log_and_token_count(tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    first = Trainer(settings(), answers, tmp_path / "first", CPU)
    first.run()
    second = Trainer(settings(init_head=str(tmp_path / "first" / "head")), answers, tmp_path / "second", CPU)
    second.run()
    before, both = read_log(tmp_path / "first"), read_log(tmp_path / "second")
    assert both[: len(before)] == before
    assert second.counters.tokens_before == first.counters.tokens
    assert both[-1]["tokens"] == first.counters.tokens + second.counters.tokens
    assert f"tokens seen: {both[-1]['tokens']:,}" in (tmp_path / "second" / "head" / "README.md").read_text()


def test_a_folder_that_grows_at_the_front_does_not_change_what_is_validated(tmp_path: Path) -> None:
    """Shards of the first process come before those of the second."""
    answers = write_answers(tmp_path, sequences=4)
    generator = torch.Generator().manual_seed(5)
    write_shard(answers, [a_sequence(generator, index) for index in range(200)], part=1)
    trainer = Trainer(settings(), answers, tmp_path / "run", CPU)
    trainer._validator(trainer.head)
    write_shard(answers, [a_sequence(generator, index) for index in range(100)], part=0)
    fresh = Trainer(settings(), answers, tmp_path / "fresh", CPU)
    assert trainer._validator(trainer.head) == fresh._validator(trainer.head)


@pytest.mark.parametrize("changes", [{"draft_vocab_size": 30}, {"init_head": "elsewhere"}, {"start": "random"}])
def test_options_that_a_resumed_run_would_ignore_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    answers = write_answers(tmp_path)
    Trainer(settings(), answers, tmp_path / "run", CPU).run()
    with pytest.raises(ConfigError, match=f"made with {next(iter(changes))}="):
        Trainer(settings(**changes), answers, tmp_path / "run", CPU)
