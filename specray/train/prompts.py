"""Prompts for training data: rows of prompt files, and prompts that the target generates itself.

The latter need no data set: given the chat template up to the start of the user's words, the target generates a turn.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from specray.errors import ConfigError
from specray.models.tokenizer import render_chat

MAX_SHOWN = 60  # characters of a bad row in errors


@dataclass(slots=True)
class PromptFile:
    """A file's usable prompts, with details for the model card."""

    path: Path
    texts: list[str] = field(default_factory=list)
    licences: Counter[str] = field(default_factory=Counter)
    bad_rows: list[str] = field(default_factory=list)  # "line 7: why"

    def describe(self) -> dict[str, Any]:
        """The file's entry in answers.json, with its name but not its folder."""
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        return {
            "file": self.path.name,
            "sha256": digest,
            "prompts": len(self.texts),
            "licences": dict(self.licences),
            "skipped_rows": len(self.bad_rows),
        }


def read_prompt_file(path: Path, max_bad_rows: int) -> PromptFile:
    """Read a JSON Lines file whose rows have `turns` (the first is used), `messages` or `prompt`, and maybe `license`.

    Unusable rows are recorded with their line numbers. ConfigError if there are more than `max_bad_rows`, or if no
    prompt is left.
    """
    file = PromptFile(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # strings may hold other line breaks
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); convert it to one JSON object per line") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _read_row(file, number, line)
        if len(file.bad_rows) > max_bad_rows:
            listed = "; ".join(file.bad_rows)
            raise ConfigError(
                f"{path} has more than {max_bad_rows} unusable rows ({listed}); correct them or raise --max-bad-rows"
            )
    if not file.texts:
        raise ConfigError(f'{path} contains no prompts; write rows such as {{"turns": ["What is a tree?"]}}')
    return file


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of `text` as a user's turn, up to the start of the answer. Without a chat template: the bare text."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    return render_chat(tokenizer, [{"role": "user", "content": text}])


def user_turn(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Token ids of the chat template up to the user's words, and the special token that follows these, if one does.

    Without a chat template: the BOS token, and none.
    """
    if tokenizer.chat_template is None and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id], []
    first, second = (chat_prompt(tokenizer, text) for text in ("Alpha", "Zoo"))
    common = _num_equal(first, second)
    if common == 0:
        raise ConfigError(
            "this model's chat template begins with the user's words, so the target cannot generate prompts; "
            "give --prompts files and --self-prompts 0"
        )
    num_after = _num_equal(first[::-1], second[::-1])
    end = first[len(first) - num_after :][:1]
    return first[:common], [token for token in end if token in tokenizer.added_tokens_decoder]


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens with which both sequences begin; 0 if they are equal."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)


def _read_row(file: PromptFile, number: int, line: str) -> None:
    try:
        row = json.loads(line)
        text = _first_turn(row)
    except (ValueError, RecursionError) as error:
        problem = "not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else error
        file.bad_rows.append(f"line {number}: {problem} (it is {_shown(line)})")
        return
    file.texts.append(text)
    file.licences[str(row.get("license", "not stated"))] += 1


def _first_turn(row: Any) -> str:
    """The first user turn of a row. ValueError if there is none."""
    try:
        if "turns" in row:
            text = row["turns"][0]
        elif "messages" in row:
            text = next((message["content"] for message in row["messages"] if message["role"] == "user"), None)
        else:
            text = row["prompt"]
    except (KeyError, TypeError, IndexError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text in turns[0], a user's message or prompt")
    return text


def _shown(line: str) -> str:
    """The beginning of a bad row."""
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}…"
