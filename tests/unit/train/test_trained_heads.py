"""Heads that were trained draft as they do when the engine serves the exported files."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.eagle3 import ParallelHead
from specray.models.heads.loading import load_eagle3_head, load_eagle_head
from specray.models.heads.mtp import MtpHead, load_mtp_layers
from specray.models.heads.served import EagleHead
from specray.models.target_matrices import TargetMatrices
from specray.train.settings import TrainSettings
from specray.train.target import load_target
from specray.train.trainer import Trainer
from specray.train.unroll import Batch, labeled_positions, unroll
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import VOCAB_SIZE
from tests.support.training_data import HIDDEN, write_answers

CPU = torch.device("cpu")
STEPS = 3
VERSIONS: dict[str, Literal[2, 3]] = {"eagle2": 2, "eagle3": 3}
ALGORITHMS = {"eagle2": "EAGLE", "eagle3": "EAGLE3", "parallel": "PARALLEL"}


def served(kind: str, folder: Path, target: Path) -> EagleHead:
    loaded = load_target(str(target), torch.float32, CPU, 64)
    matrices = TargetMatrices(loaded.shape, 64, loaded.folder, "auto", torch.float32, CPU, None)
    if kind == "mtp":
        return MtpHead(load_mtp_layers(folder, "auto", matrices))
    speculative = SpeculativeConfig(algorithm=ALGORITHMS[kind], draft_model_path=str(folder))
    if kind == "parallel":
        return load_eagle3_head(speculative, matrices, ParallelHead)
    return load_eagle_head(speculative, matrices, VERSIONS[kind])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "eagle3"},
        {"kind": "eagle3", "num_layers": 2},
        {"kind": "parallel"},
        {"kind": "eagle2"},
        {"kind": "eagle2", "bias": True},
        {"kind": "mtp"},
    ],
    ids=str,
)
def test_unrolled_steps_equal_served_ones(options: dict[str, Any], tmp_path: Path) -> None:
    settings = TrainSettings(tokens=1, draft_vocab_size=VOCAB_SIZE, batch_tokens=64, dtype="float32", **options)
    trainer = Trainer(settings, write_answers(tmp_path), tmp_path / "run", CPU)
    torch.manual_seed(3)
    for name, parameter in trainer.head.named_parameters():  # values near 0 or 1 would hide mistakes
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        parameter.data = parameter.data.bfloat16().float()  # the files' type
    trainer._save()
    assert_drafts_alike(trainer, served(settings.kind, tmp_path / "run" / "head", tmp_path / "target"))


@torch.no_grad()
def assert_drafts_alike(trainer: Trainer, head: EagleHead) -> None:
    batch = a_batch(trainer._settings.kind)
    per_row, seen = batch.token_ids.shape[1] - batch.start, 0
    for depth, step in enumerate(unroll(trainer.head, trainer._target, batch, labeled_positions(batch), STEPS)):
        for output, chain in zip(step.outputs, step.chains.tolist(), strict=True):
            row, start = chain // per_row, batch.start + chain % per_row
            logits = output @ trainer.head.output_weight.T
            torch.testing.assert_close(logits, chain_logits(head, batch, row, start, depth), rtol=1e-3, atol=1e-3)
            seen += 1
    assert seen > 20


def a_batch(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(5)
    columns = HIDDEN if kind in ("eagle2", "mtp") else 3 * HIDDEN
    aux_hidden_states, final = (torch.randn(2, 9, width, generator=generator) for width in (columns, HIDDEN))
    token_ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=generator)
    # An MTP layer masks the embedding at position 0, where it must have a chain; others start later, at position 1.
    prompt_lengths = torch.tensor([2 if kind == "mtp" else 4, 3])
    return Batch(token_ids, torch.tensor([9, 7]), prompt_lengths, aux_hidden_states, final)


def chain_logits(head: EagleHead, batch: Batch, row: int, start: int, depth: int) -> Tensor:
    """Those after `depth` + 1 steps, each computed from the whole prefix."""
    states, tokens = head.fuse(batch.aux_hidden_states[row, : start + 1]), batch.token_ids[row, 1 : start + 2]
    output = head(tokens, states, torch.arange(len(states)), attend_to_the_past)
    for step in range(1, depth + 1):
        token, state = batch.token_ids[row, start + 1 + step : start + 2 + step], head.recur(output[-1:])
        if isinstance(head, ParallelHead):
            token, state = torch.tensor([head.mask_token_id]), head.mask_state
        tokens, states = torch.cat((tokens, token)), torch.cat((states, state))
        output = head(tokens, states, torch.arange(len(states)), attend_to_the_past)
    return head.logits(output[-1:])[0]
