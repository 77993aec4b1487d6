"""The prompts of a request without messages: one or several, as text or token ids.

A body can hold a million token ids. Validation runs on the event loop and does not look at them; `checked_token_ids`
checks them in a thread, after their number.
"""

from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from specray.errors import InvalidRequestError
from specray.server.errors import short_repr

MAX_PROMPTS = 256  # also the most choices of a request, over all prompts
MAX_TOKEN_ID = 2**31 - 1


class PromptSet(NamedTuple):
    """The prompts of a request: all strings, or all lists of what should be token ids."""

    items: list[str] | list[list[int]]
    is_batch: bool  # sent as a list of prompts, possibly with one element
    field: str  # the request's field, for errors


def checked_token_ids(values: list[int], field: str) -> list[int]:
    """The values of a PromptSet, once they are known to be token ids. InvalidRequestError if they are not."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_TOKEN_ID:
        raise _refusal(values, field)
    return values


def _prompt_set(value: object, info: ValidationInfo) -> PromptSet:
    field = info.field_name or ""
    is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    items: Any = value if is_batch else [value]
    if len(items) <= MAX_PROMPTS and (_are_texts(items) or _are_lists(items)):
        return PromptSet(items, is_batch, field)
    raise _refusal(value, field)


def _are_texts(items: list[object]) -> bool:
    return all(isinstance(item, str) for item in items)


def _are_lists(items: list[object]) -> bool:
    return all(isinstance(item, list) and item for item in items)


def _refusal(value: object, field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field}={short_repr(value)}: expected a string, token ids (0 to {MAX_TOKEN_ID}), or a list of 1 to "
        f"{MAX_PROMPTS} of one of these",
        field,
    )


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
