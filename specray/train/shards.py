"""Training data on disk: the target's answers with their hidden states.

A folder of answers contains `answers.json` ({"model", "aux_hidden_state_layers", "hidden_size", "num_layers", …}) and
shards, `shard-PART-NUMBER.safetensors`, which are written atomically. A shard has

    token_ids          int32 [T]  its sequences, concatenated
    lengths            int32 [n]  tokens of each sequence, sum T
    prompt_lengths     int32 [n]  tokens before the first one that the target generated
    indexes            int64 [n]  the request of the run that each sequence belongs to
    aux_hidden_states  bfloat16 [T, len(aux_hidden_state_layers) * hidden_size], columns in that order; absent if the
                       target computes them during training (see `hidden_states`)

`skipped-PART.txt` lists the requests that have no answer, each with the reason.

`aux_hidden_state_layers` are those of EAGLE-3, then `num_layers`: the hidden states after the final norm. The last
position of every sequence is zeros, because its hidden states were not computed.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specray.errors import ConfigError
from specray.train.run_files import replace_tensors

DESCRIPTION = "answers.json"
_PATTERN = "shard-*.safetensors"
_FIELDS = {"model": str, "aux_hidden_state_layers": list, "hidden_size": int, "num_layers": int}
# Longer than the header that all generated conversations share.
_KEY_TOKENS = 48
_HELD_OUT_PERCENT = 2


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A recorded request: a prompt and the target's answer."""

    token_ids: Sequence[int]  # n
    prompt_length: int
    aux_hidden_states: Tensor | None  # bfloat16 [n, columns]; the last row is zeros
    index: int  # the request's number in its run


@dataclass(frozen=True, slots=True)
class Answer:
    """One sequence as views of the memory-mapped file."""

    token_ids: Tensor  # int32 [n]
    prompt_length: int
    aux_hidden_states: Tensor | None  # bfloat16 [n, columns], the last row zeros; None: not stored

    def truncated(self, length: int) -> "Answer":
        """The first `length` tokens."""
        states = self.aux_hidden_states
        return Answer(self.token_ids[:length], self.prompt_length, None if states is None else states[:length])


def write_shard(folder: Path, sequences: Sequence[TokenSequence], part: int = 0) -> Path:
    """Write the next shard of process `part` atomically."""
    tensors = {
        "token_ids": torch.tensor([token for row in sequences for token in row.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(row.token_ids) for row in sequences], dtype=torch.int32),
        "prompt_lengths": torch.tensor([row.prompt_length for row in sequences], dtype=torch.int32),
        "indexes": torch.tensor([row.index for row in sequences], dtype=torch.int64),
    }
    states = [row.aux_hidden_states.bfloat16() for row in sequences if row.aux_hidden_states is not None]
    if states:
        tensors["aux_hidden_states"] = torch.cat(states)
    path = folder / f"shard-{part:02d}-{_next_number(folder, part):05d}.safetensors"
    replace_tensors(path, tensors)
    return path


def written_indexes(folder: Path) -> set[int]:
    """Requests of the run that are in a shard."""
    opener: Any = safe_open  # untyped in its package
    indexes: set[int] = set()
    for name in list_shards(folder):
        try:
            with opener(folder / name, framework="pt") as file:
                indexes.update(file.get_tensor("indexes").tolist())
        except (SafetensorError, OSError) as error:
            raise _unreadable(folder / name, error) from error
    return indexes


def write_skipped(folder: Path, reasons: Mapping[int, str], part: int) -> None:
    """Note requests of process `part` that have no answer, and why; a resumed run does not try them again."""
    with (folder / f"skipped-{part:02d}.txt").open("a", encoding="utf-8") as file:
        file.write("".join(f"{index} {reason}\n" for index, reason in reasons.items()))


def skipped(folder: Path) -> dict[int, str]:
    """Requests of the run that were noted by `write_skipped`, and why."""
    files = [path.read_text(encoding="utf-8") for path in folder.glob("skipped-*.txt")]
    noted = [line.partition(" ") for text in files for line in text.splitlines()]
    return {int(index): reason or "reason not noted" for index, _, reason in noted}


def skip_summary(folder: Path) -> str:
    """How many requests were skipped, and why; empty if none was."""
    reasons = skipped(folder)
    counts = ", ".join(f"{count}: {reason}" for reason, count in Counter(reasons.values()).most_common())
    return f"{len(reasons)} prompts were skipped ({counts})" if reasons else ""


def read_description(folder: Path) -> dict[str, Any]:
    """The content of answers.json. ConfigError if the file or a field is missing."""
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); give a folder of answers, or make them with --prompts or --self-prompts"
        ) from None
    for name, kind in _FIELDS.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ConfigError(f"{path}: {name} is missing or not a {kind.__name__}; write the answers again")
    return dict(content)


def list_shards(folder: Path) -> list[str]:
    """Sorted names of the current shards."""
    return sorted(path.name for path in folder.glob(_PATTERN))


class Shard:
    """One memory-mapped shard. Hidden states are read when a sequence is used."""

    def __init__(self, path: Path, columns: int | None, num_asked: int = 0) -> None:
        """ConfigError if the file is damaged or its hidden states do not have `columns` columns; None: not stored.

        The first `num_asked` requests of the run have prompts of files, which have several answers each.
        """
        self.path = path
        self._num_asked = num_asked
        tensors = _open(path)
        self._token_ids = tensors["token_ids"]
        self._aux_hidden_states = tensors.get("aux_hidden_states")
        self.lengths: list[int] = tensors["lengths"].tolist()
        self.prompt_lengths: list[int] = tensors["prompt_lengths"].tolist()
        self._indexes: list[int] = tensors["indexes"].tolist()
        self._starts = [0]
        for length in self.lengths:
            self._starts.append(self._starts[-1] + length)
        self._check(columns)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    @property
    def token_ids(self) -> Tensor:
        """int32 [T], all sequences."""
        return self._token_ids

    def tokens_of(self, index: int) -> Tensor:
        return self._token_ids[self._starts[index] : self._starts[index + 1]]

    def __getitem__(self, index: int) -> Answer:
        rows = slice(self._starts[index], self._starts[index + 1])
        states = None if self._aux_hidden_states is None else self._aux_hidden_states[rows]
        return Answer(self._token_ids[rows], self.prompt_lengths[index], states)

    def is_held_out(self, index: int) -> bool:
        """Whether this sequence is for validation only.

        Depends on the prompt alone, so that no other answer to it is trained on. A prompt that the target wrote follows
        a header that all of them share.
        """
        is_asked, length = self._indexes[index] < self._num_asked, self.prompt_lengths[index]
        key = self.tokens_of(index)[: length if is_asked else max(length, _KEY_TOKENS)]
        return zlib.crc32(key.numpy().tobytes()) % 100 < _HELD_OUT_PERCENT

    def _check(self, columns: int | None) -> None:
        seen_states = None if self._aux_hidden_states is None else tuple(self._aux_hidden_states.shape)
        shapes: dict[str, tuple[object, object]] = {
            "token_ids": (tuple(self._token_ids.shape), (self.num_tokens,)),
            "prompt_lengths": ((len(self.prompt_lengths),), (len(self.lengths),)),
            "aux_hidden_states": (seen_states, None if columns is None else (self.num_tokens, columns)),
        }
        for name, (seen, wanted) in shapes.items():
            if seen != wanted:
                raise ConfigError(
                    f"{self.path}: {name} has shape {seen}, but lengths and {DESCRIPTION} imply {wanted}; "
                    "delete the shard and write it again"
                )


def _next_number(folder: Path, part: int) -> int:
    prefix = f"shard-{part:02d}-"
    numbers = [int(name[len(prefix) :].partition(".")[0]) for name in list_shards(folder) if name.startswith(prefix)]
    return max(numbers, default=-1) + 1


def _open(path: Path) -> dict[str, Tensor]:
    opener: Any = safe_open  # untyped in its package
    try:
        with opener(path, framework="pt") as file:
            names = ["token_ids", "lengths", "prompt_lengths", "indexes"]
            names += ["aux_hidden_states"] if "aux_hidden_states" in file.keys() else []  # noqa: SIM118 — not a dict
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is not a readable shard ({error}); delete it and write it again")
