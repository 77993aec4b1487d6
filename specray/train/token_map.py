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
    check_draft_vocab_size(count, vocab_size)
    counts = token_counts(folder, vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    first = torch.tensor(list(dict.fromkeys(forced)), dtype=torch.int64)
    missing = first[~torch.isin(first, order[:count])]
    is_forced = torch.isin(order, first)
    others = order[~is_forced][: max(count - len(first), 0)]  # so many have room beside all forced ids
    kept = order[is_forced | torch.isin(order, others)]
    return torch.cat((kept[~torch.isin(kept, missing)], missing))[:count]


def check_draft_vocab_size(count: int, vocab_size: int) -> None:
    """ConfigError if the target has fewer ids."""
    if not 1 <= count <= vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {count} does not fit the target's {vocab_size}; give 1 … {vocab_size}"
        )


def token_counts(folder: AnswerFolder, vocab_size: int) -> Tensor:
    """int64 [vocab]: number of times the target generated each id."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for part in _written_tokens(folder):
        counts += torch.bincount(part, minlength=vocab_size)
    return counts


def write_token_map(path: Path, ids: Tensor) -> None:
    """Write a list of ids by frequency, with torch.save if the name ends in .pt, else as JSON. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        torch.save(ids.tolist(), path)
    else:
        path.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")


def _written_tokens(folder: AnswerFolder) -> Iterable[Tensor]:
    for name in folder.names():
        shard = folder[name]
        for index, prompt_length in enumerate(shard.prompt_lengths):
            yield shard.tokens_of(index)[prompt_length:].long()
