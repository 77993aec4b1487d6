"""Token frequencies in the target's answers, for draft vocabularies and FR-Spec token maps."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.train.batches import AnswerFolder


def frequent_ids(folder: AnswerFolder, count: int, vocab_size: int, forced: Sequence[int]) -> Tensor:
    """int64 [count]: the most frequent ids in descending order, ties by id. `forced` ids are always included."""
    if not 1 <= count <= vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {count} does not fit the target's {vocab_size}; give 1 … {vocab_size}"
        )
    counts = token_counts(folder, vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    missing = [token for token in dict.fromkeys(forced) if not bool((order[:count] == token).any())]
    kept = order[: max(count - len(missing), 0)]
    return torch.cat((kept, torch.tensor(missing, dtype=torch.int64)))[:count]


def token_counts(folder: AnswerFolder, vocab_size: int) -> Tensor:
    """int64 [vocab]: number of times the target generated each id."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for part in _written_tokens(folder):
        counts += torch.bincount(part, minlength=vocab_size)
    return counts


def write_token_map(path: Path, ids: Tensor) -> None:
    """Write a list of ids by frequency, with torch.save if the name ends in .pt, else as JSON."""
    if path.suffix == ".pt":
        torch.save(ids.tolist(), path)
    else:
        path.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")


def _written_tokens(folder: AnswerFolder) -> Iterable[Tensor]:
    for name in folder.names():
        shard = folder[name]
        for index, prompt_length in enumerate(shard.prompt_lengths):
            yield shard.tokens_of(index)[prompt_length:].long()
