"""The prompts of a request without messages: one or several, as text or token ids."""

from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from cluster.api.errors import short_repr
from specray.errors import InvalidRequestError

MAX_PROMPTS = 256  # also the most choices of a request, over all prompts
MAX_TOKEN_ID = 2**31 - 1


class PromptSet(NamedTuple):
    """The prompts of a request: all strings or all token ids."""

    items: list[str] | list[list[int]]
    is_batch: bool  # sent as a list of prompts, possibly with one element


def _prompt_set(value: object, info: ValidationInfo) -> PromptSet:
    is_batch = not (isinstance(value, str) or _is_token_ids(value))
    items: Any = value if is_batch else [value]
    is_list = isinstance(items, list) and 1 <= len(items) <= MAX_PROMPTS
    if is_list and (all(isinstance(item, str) for item in items) or all(_is_token_ids(item) for item in items)):
        return PromptSet(items, is_batch)
    raise InvalidRequestError(
        f"{info.field_name}={short_repr(value)}: expected a string, token ids (0 to {MAX_TOKEN_ID}), or a list of 1 to "
        f"{MAX_PROMPTS} of one of these",
        info.field_name,
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in value)


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS_SCHEMA,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
PromptField = Annotated[PromptSet, PlainValidator(_prompt_set), WithJsonSchema(_PROMPT_SCHEMA)]


def check_choices(num_prompts: int, n: int) -> None:
    """InvalidRequestError if `n` choices for each of the prompts are too many."""
    if num_prompts * n > MAX_PROMPTS:
        raise InvalidRequestError(
            f"n={n} for {num_prompts} prompts makes {num_prompts * n} choices, more than {MAX_PROMPTS}; reduce n or "
            "the number of prompts",
            "n",
        )
