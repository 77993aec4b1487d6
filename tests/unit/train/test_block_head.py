"""DFlash and DSpark heads learn, and draft as they were trained when the engine serves the exported files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.block import BlockHead
from specray.models.heads.loading import load_block_head
from specray.models.target_matrices import TargetMatrices
from specray.train.run_files import read_log
from specray.train.settings import TrainSettings
from specray.train.trainer import Trainer
from specray.train.unroll import Batch, labeled_positions, unroll
from tests.support.engine import make_llm
from tests.support.toy import VOCAB_SIZE
from tests.support.training_data import HIDDEN, write_answers

CPU = torch.device("cpu")
STEPS = 3
RANK = {"dflash": 0, "dspark": 4}


def trainer_of(kind: str, folder: Path, tokens: int = 1, **options: object) -> Trainer:
    common = {"unroll": STEPS, "num_layers": 2, "batch_tokens": 256, "dtype": "float32", "markov_rank": RANK[kind]}
    common |= {"draft_vocab_size": VOCAB_SIZE} | options
    settings = TrainSettings(kind=kind, tokens=tokens, **common)  # type: ignore[arg-type]
    return Trainer(settings, write_answers(folder), folder / "run", CPU)


def served(trainer: Trainer, kind: str, folder: Path) -> BlockHead:
    target = trainer._target
    matrices = TargetMatrices(target.shape, 64, target.folder, "auto", torch.float32, CPU, None)
    return load_block_head(SpeculativeConfig(algorithm=kind.upper(), draft_model_path=str(folder)), matrices)


@torch.no_grad()
@pytest.mark.parametrize("kind", RANK)
def test_unrolled_steps_equal_served_ones(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path)
    torch.manual_seed(3)
    for name, parameter in trainer.head.named_parameters():  # values near 0 or 1 would hide mistakes
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        parameter.data = parameter.data.bfloat16().float()  # the files' type
    trainer._save()
    head, batch = served(trainer, kind, tmp_path / "run" / "head"), a_batch()
    per_row, seen = batch.token_ids.shape[1] - batch.start, 0
    for depth, step in enumerate(unroll(trainer.head, trainer._target, batch, labeled_positions(batch), STEPS)):
        confidence = trainer.head.network.confidence  # type: ignore[union-attr]
        for output, chain in zip(step.outputs, step.chains.tolist(), strict=True):
            row, start = chain // per_row, batch.start + chain % per_row
            logits, sure = block_logits(head, batch, row, start, depth)
            torch.testing.assert_close(output @ trainer.head.output_weight.T, logits, rtol=1e-3, atol=1e-3)
            if confidence is not None:
                torch.testing.assert_close(confidence(output[None]).sigmoid(), sure, rtol=1e-3, atol=1e-3)
            seen += 1
    assert seen > 15
    assert (confidence is not None) == (kind == "dspark")


def a_batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    aux_hidden_states, final = (torch.randn(2, 9, width, generator=generator) for width in (3 * HIDDEN, HIDDEN))
    token_ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=generator)
    return Batch(token_ids, torch.tensor([9, 7]), torch.tensor([4, 3]), aux_hidden_states, final)


def block_logits(head: BlockHead, batch: Batch, row: int, start: int, depth: int) -> tuple[Tensor, Tensor | None]:
    """(logits, confidence) of a row of the block behind the context up to position `start`."""
    positions, tokens = torch.arange(start + 1 + head.config.block_size), batch.token_ids[row]
    context = head.context_kv(head.fuse(batch.aux_hidden_states[row, : start + 1]), positions[: start + 1])

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        k, v = torch.cat((context[layer], kv)).repeat_interleave(q.shape[1] // kv.shape[2], 2).permute(1, 2, 0, 3)
        weights = (q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    ids = torch.full((head.config.block_size,), head.mask_token_id)
    ids[0] = tokens[start + 1]
    output = head(ids, positions[start + 1 :], attend)  # type: ignore[arg-type]
    output = output[head.config.block_size - head.config.num_predicted :][depth : depth + 1]
    bias, sure, _ = head.after_tokens(tokens[start + 1 + depth, None], output, None)
    logits = head.logits(output)[0]
    return logits if bias is None else logits + bias[0], sure


@pytest.mark.parametrize("kind", RANK)
def test_the_loss_falls_and_the_head_drafts(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer = trainer_of(kind, tmp_path, tokens=30_000, draft_vocab_size=40, validate_every=2_000, learning_rate=3e-3)
    assert trainer.run()
    losses = [line["loss"] for line in read_log(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.2, losses
    head = str(tmp_path / "run" / "head")
    speculative = SpeculativeConfig(
        algorithm=kind.upper(), draft_model_path=head, num_steps=3, eagle_topk=3, num_draft_tokens=8
    )
    with make_llm(tmp_path / "target", speculative=speculative) as llm:
        [generation] = llm.generate([[0, 9, 8, 7, 6, 5, 9, 8]])
    assert generation.choices[0].usage.num_draft_tokens > 0
