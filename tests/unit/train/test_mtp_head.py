"""Trained MTP layers: unrolled steps equal those of the engine's layer loaded from the exported files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specray.config import SpeculativeConfig
from specray.models.heads.mtp import MtpHead as ServedHead
from specray.models.heads.mtp import load_mtp_layers
from specray.models.target_matrices import TargetMatrices
from specray.train.heads import TrainedMtpHead
from specray.train.settings import TrainSettings
from specray.train.target import Target, load_target
from specray.train.trainer import Trainer
from specray.train.unroll import Batch, labeled_positions, unroll
from tests.support.engine import make_llm
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import VOCAB_SIZE
from tests.support.training_data import HIDDEN, write_answers

CPU = torch.device("cpu")
STEPS = 3


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer that has exported random weights, with norms around 1 and biases that are not zero."""
    settings = TrainSettings(
        kind="mtp", tokens=1, draft_vocab_size=VOCAB_SIZE, batch_tokens=64, dtype="float32", validate_every=10_000
    )
    trainer = Trainer(settings, write_answers(tmp_path), tmp_path / "run", CPU)
    torch.manual_seed(3)
    for name, parameter in trainer.head.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        parameter.data = parameter.data.bfloat16().float()  # the files' type
    trainer._save()
    return trainer


def a_batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    aux_hidden_states, final = (torch.randn(2, 9, HIDDEN, generator=generator) for _ in range(2))
    token_ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=generator)
    return Batch(token_ids, torch.tensor([9, 7]), torch.tensor([2, 3]), aux_hidden_states, final)


@torch.no_grad()
def test_unrolled_steps_equal_served_ones(trainer: Trainer, tmp_path: Path) -> None:
    target, head, batch = load_target(str(tmp_path / "target"), torch.float32, CPU, 64), trainer.head, a_batch()
    assert isinstance(head, TrainedMtpHead)
    served = ServedHead(load_mtp_layers(tmp_path / "run" / "head", "auto", matrices(target)))
    per_row, seen = batch.token_ids.shape[1] - batch.start, 0
    for depth, step in enumerate(unroll(head, target, batch, labeled_positions(batch), STEPS)):
        for output, chain in zip(step.outputs, step.chains.tolist(), strict=True):
            row, start = chain // per_row, batch.start + chain % per_row
            torch.testing.assert_close(output, chain_of(served, batch, row, start, depth), rtol=1e-3, atol=1e-3)
            seen += 1
    assert batch.start == 0, "the batch must have a chain at position 0, where the embedding is masked"
    assert seen > 20


def chain_of(served: ServedHead, batch: Batch, row: int, start: int, depth: int) -> torch.Tensor:
    """The state after `depth` + 1 steps, each computed from the whole prefix."""
    states = batch.aux_hidden_states[row, : start + 1]
    for _ in range(depth + 1):
        length = len(states)
        output = served(batch.token_ids[row, 1 : length + 1], states, torch.arange(length), attend_to_the_past)
        states = torch.cat((states, output[-1:]))
    return states[-1]


def matrices(target: Target) -> TargetMatrices:
    return TargetMatrices(target.shape, 64, target.folder, "auto", torch.float32, CPU, None)


def test_initial_mtp_layer_passes_the_targets_state_on(tmp_path: Path) -> None:
    target = load_target(str(write_answers(tmp_path).parent / "target"), torch.float32, CPU, 64)
    head, batch = TrainedMtpHead(target.shape, torch.arange(VOCAB_SIZE), target), a_batch()
    head.start_from(target)
    states = torch.nn.functional.rms_norm(batch.aux_hidden_states, (HIDDEN,)) * target.norm
    final = Batch(batch.token_ids, batch.lengths, batch.prompt_lengths, states, batch.final)
    [step] = unroll(head, target, final, labeled_positions(final), 1)
    whole = states[:, batch.start :].flatten(0, 1)
    # Directions are compared: matrices with small initial values add about 1 % of noise.
    alike = torch.cosine_similarity(step.outputs, whole[step.chains], dim=-1)
    assert alike.min() > 0.95


@pytest.mark.usefixtures("trainer")
def test_mtp_is_exported_in_mimos_layout_and_drafts(tmp_path: Path) -> None:
    head = tmp_path / "run" / "head"
    names = set(load_file(head / "model.safetensors"))
    assert all(name.startswith("model.mtp_layers.0.") for name in names)
    assert {"model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.k_proj.bias"} <= names
    config = json.loads((head / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    speculative = SpeculativeConfig(algorithm="MTP", draft_model_path=str(head))
    with make_llm(tmp_path / "target", speculative=speculative) as llm:
        assert llm.generate([[0, 5, 9]])[0].choices[0].token_ids
