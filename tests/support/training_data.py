"""Small training data for tests: random tokens, and hidden states that depend on this and the next token."""

import json
from pathlib import Path

import torch
from torch import Tensor

from specray.train.shards import TokenSequence, write_shard
from tests.support.toy import VOCAB_SIZE, write_toy

HIDDEN = 32  # of the toy model


def write_answers(folder: Path, shards: int = 1, sequences: int = 24, seed: int = 0) -> Path:
    """A toy target in folder/target and its answers in folder/answers; returns the latter."""
    target, answers = folder / "target", folder / "answers"
    if not target.exists():
        target.mkdir(parents=True)
        answers.mkdir()
        write_toy(target)
        description = {
            "model": str(target),
            "aux_hidden_state_layers": [0, 1, 1, 2],
            "hidden_size": HIDDEN,
            "num_layers": 2,
        }
        (answers / "answers.json").write_text(json.dumps(description))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(shards):
        write_shard(answers, [a_sequence(generator, index) for index in range(sequences)])
    return answers


def a_sequence(generator: torch.Generator, index: int) -> TokenSequence:
    length = int(torch.randint(60, 80, (1,), generator=generator))
    token_ids = torch.randint(2, VOCAB_SIZE, (length,), generator=generator)
    return TokenSequence(token_ids.tolist(), 5, _aux_hidden_states(token_ids), index)


def _aux_hidden_states(token_ids: Tensor) -> Tensor:
    """bfloat16 [n, 4 * HIDDEN], a function of this and the next token."""
    table = torch.randn(VOCAB_SIZE, 4 * HIDDEN, generator=torch.Generator().manual_seed(7))
    aux_hidden_states = table[token_ids] + table[token_ids.roll(-1)]
    aux_hidden_states[-1] = 0
    return aux_hidden_states.bfloat16()
