"""Prompts for benchmarks: the user's file, or the small built-in set."""

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specray.config import with_values
from specray.errors import ConfigError


class Prompt(BaseModel):
    """One conversation. Turn 2 is sent after the model's own answer to turn 1."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # data sets have further fields

    id: str | int = ""  # the line's number by default
    category: str = "all"
    turns: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _turns_of_other_forms(cls, row: Any) -> Any:
        """Rows with `prompt`, or with `messages`, of which the user's are the turns."""
        if not isinstance(row, dict) or "turns" in row:
            return row
        if "prompt" in row:
            return row | {"turns": [row["prompt"]]}
        messages = [part for part in row.get("messages") or () if isinstance(part, dict) and part.get("role") == "user"]
        return row | {"turns": [part.get("content") for part in messages]}


def load_prompts(path: Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON Lines file, or the built-in ones (chat, copy and code). Raises ConfigError naming the line.

    `limit`: at most this many, from each category in turn.
    """
    if path is None:
        text, name = files("specray.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8"), "prompts.jsonl"
    else:
        text, name = _read(path), str(path)
    numbered = enumerate(text.split("\n"), start=1)  # strings may hold other line breaks
    prompts = [_parse(name, number, line) for number, line in numbered if line.strip()]
    if not prompts:
        raise ConfigError(
            f'{name} holds no prompts; write one JSON object on each line: {{"turns": ["What is a tree?"]}}'
        )
    return prompts if limit is None else _spread(prompts)[:limit]


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); convert it to one JSON object per line") from None


def _parse(name: str, number: int, line: str) -> Prompt:
    place = f"{name}, line {number}"
    try:
        prompt = Prompt.model_validate(json.loads(line))
        return prompt if prompt.id != "" else with_values(prompt, id=number)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ConfigError(f"{place}: {field}: {first['msg']}; needed are turns (or prompt, or messages)") from None


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    rounds = zip_longest(*by_category(prompts).values())
    return [prompt for prompts_of_round in rounds for prompt in prompts_of_round if prompt is not None]
