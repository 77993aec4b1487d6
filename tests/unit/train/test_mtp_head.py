"""Trained MTP layers: their initialization and their files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specray.config import SpeculativeConfig
from specray.train.heads import TrainedMtpHead
from specray.train.settings import TrainSettings
from specray.train.target import load_target
from specray.train.trainer import Trainer
from specray.train.unroll import Batch, labeled_positions, unroll
from tests.support.engine import make_llm
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
