"""Batches from a folder of answers, in an order that resumes from a checkpoint.

The folder may grow during training. Each round reads the shards with the fewest visits, so that new ones come first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specray.errors import ConfigError
from specray.train.shards import Answer, Shard, list_shards, read_description, skip_summary
from specray.train.unroll import Batch

HiddenStates = Callable[[Sequence[Answer]], list[Tensor]]  # bfloat16 [n, columns] of each answer

Place = tuple[str, int]  # a sequence: its shard's name, and its row there

_ROUND_SHARDS = 8  # read together in random order
_POOL_BATCHES = 32  # batches whose sequences are sorted by length together


class AnswerFolder:
    """The shards of a folder, opened on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description: dict[str, Any] = read_description(path)
        self.hidden_size: int = self.description["hidden_size"]
        self.aux_hidden_state_layers: list[int] = self.description["aux_hidden_state_layers"]
        self.stores_hidden_states: bool = self.description.get("hidden_states", "stored") == "stored"
        self.is_log = "source" in self.description  # see `from_log`
        self._shards: dict[str, Shard] = {}

    def names(self) -> list[str]:
        """Names of the current shards. ConfigError if there are none."""
        names = list_shards(self.path)
        if not names:
            why = skip_summary(self.path) or "it has no shards yet"
            raise ConfigError(
                f"{self.path} has no answers: {why}; make answers with --prompts or --self-prompts, or wait for the "
                "first shard"
            )
        return names

    def size(self) -> dict[str, int]:
        """Numbers of sequences and tokens in the current shards."""
        shards = [self[name] for name in self.names()]
        return {"sequences": sum(map(len, shards)), "tokens": sum(shard.num_tokens for shard in shards)}

    def __getitem__(self, name: str) -> Shard:
        if name not in self._shards:
            columns = self.hidden_size * len(self.aux_hidden_state_layers) if self.stores_hidden_states else None
            self._shards[name] = Shard(self.path / name, columns, self.description.get("num_asked", 0))
        return self._shards[name]

    def usable(self, name: str, max_length: int, *, held_out: bool) -> list[Place]:
        """A shard's sequences with an answer within `max_length` tokens: those held out, or those to train on."""
        shard = self[name]
        return [
            (name, row)
            for row, prompt in enumerate(shard.prompt_lengths)
            if min(shard.lengths[row], max_length) > max(prompt + 1, 3) and shard.is_held_out(row) == held_out
        ]


@dataclass(slots=True)
class Progress:
    """A run's position in the data; plain values for the checkpoint."""

    round: int = 0
    names: list[str] = field(default_factory=list)  # shards of this round
    batch: int = 0  # the next one of this round
    visits: dict[str, int] = field(default_factory=dict)  # finished rounds by shard


class BatchStream:
    """An endless stream of batches."""

    def __init__(self, folder: AnswerFolder, progress: Progress, seed: int, batch_tokens: int, max_length: int) -> None:
        self._folder = folder
        self.progress = progress
        self._seed = seed
        self._batch_tokens = batch_tokens
        self._max_length = max_length
        self._batches: list[list[Place]] = self._plan() if progress.names else []

    def __next__(self) -> list[Answer]:
        while self.progress.batch >= len(self._batches):
            self._next_round()
        picked = self._batches[self.progress.batch]
        self.progress.batch += 1
        return [self._folder[name][index] for name, index in picked]

    def _next_round(self) -> None:
        progress = self.progress
        for name in progress.names:
            progress.visits[name] = progress.visits.get(name, 0) + 1
        names = self._folder.names()
        fewest = min(progress.visits.get(name, 0) for name in names)
        least = [name for name in names if progress.visits.get(name, 0) == fewest]
        Random(f"{self._seed} {progress.round}").shuffle(least)
        progress.round, progress.names, progress.batch = progress.round + 1, sorted(least[:_ROUND_SHARDS]), 0
        self._batches = self._plan()
        if not self._batches and not any(map(self._usable, names)):
            raise ConfigError(
                f"{self._folder.path} has no sequence to train on yet: all have no answer within the first "
                f"{self._max_length} tokens, or are held out; raise --max-length, or wait for more answers"
            )

    def _plan(self) -> list[list[Place]]:
        """This round's batches: shuffled, each of sequences of similar lengths."""
        random = Random(f"{self._seed} {self.progress.round} batches")
        pool = [place for name in self.progress.names for place in self._usable(name)]
        random.shuffle(pool)
        size = max(1, _POOL_BATCHES * self._batch_tokens // 256)
        parts = [pool[begin : begin + size] for begin in range(0, len(pool), size)]
        batches = [batch for part in parts for batch in self._cut(sorted(part, key=self._length))]
        random.shuffle(batches)
        return batches

    def _usable(self, name: str) -> list[Place]:
        return self._folder.usable(name, self._max_length, held_out=False)

    def _cut(self, places: Sequence[Place]) -> list[list[Place]]:
        """Places in ascending length, in batches of at most `batch_tokens` padded positions (or one sequence)."""
        batches: list[list[Place]] = []
        for place in places:
            if batches and (len(batches[-1]) + 1) * self._length(place) <= self._batch_tokens:
                batches[-1].append(place)
            else:
                batches.append([place])
        return batches

    def _length(self, place: Place) -> int:
        return min(self._folder[place[0]].lengths[place[1]], self._max_length)


def stored_hidden_states(answers: Sequence[Answer]) -> list[Tensor]:
    return [answer.aux_hidden_states for answer in answers if answer.aux_hidden_states is not None]


@dataclass(frozen=True, slots=True)
class Collate:
    """Pads answers into one batch on the training device."""

    columns: slice  # the part of the hidden states that is the head's input
    hidden_size: int
    max_length: int
    dtype: torch.dtype
    device: torch.device
    hidden_states: HiddenStates = stored_hidden_states

    def __call__(self, answers: Sequence[Answer]) -> Batch:
        answers = [answer.truncated(self.max_length) for answer in answers]
        lengths = [len(answer.token_ids) for answer in answers]
        aux_hidden_states = pad_sequence(self.hidden_states(answers), batch_first=True).to(self.device, self.dtype)
        token_ids = pad_sequence([answer.token_ids.long() for answer in answers], batch_first=True)
        return Batch(
            token_ids=token_ids.to(self.device),
            lengths=torch.tensor(lengths, device=self.device),
            prompt_lengths=torch.tensor([answer.prompt_length for answer in answers], device=self.device),
            aux_hidden_states=aux_hidden_states[..., self.columns],
            final=aux_hidden_states[..., -self.hidden_size :],
        )
