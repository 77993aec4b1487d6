"""What a request asks its output to match. `specray.structured_output` compiles and enforces it.

Plain data without torch or llguidance: it travels with the request's sampling parameters to every process.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from specray.errors import InvalidRequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_LENGTH = 1 << 18  # characters
# The error of a request whose grammar asks for text that the model's vocabulary cannot spell.
NO_TOKEN_ALLOWED = "no token of the model's vocabulary continues the output as the request's grammar requires"

GRAMMAR_LIMIT_EXCEEDED = (
    "the request's grammar needs more work for one token than a step may do; simplify it (fewer alternatives that "
    "begin alike, less recursion, smaller bounds of repetitions)"
)
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens and the grammar of this request (from "
    "response_format or tools, for example) together forbid all; leave one of them out"
)
# Errors of a running request that its own options cause, and the option to blame; None: several.
REQUEST_ERRORS: dict[str, str | None] = {
    NO_TOKEN_ALLOWED: "grammar",
    GRAMMAR_LIMIT_EXCEEDED: "grammar",
    NO_TOKEN_LEFT: None,
}


class GrammarSpec(NamedTuple):
    """A grammar in the notation of its kind. Construct it with `make_grammar`, which checks it."""

    kind: GrammarKind
    text: str = ""  # JSON of the schema, choices or tags; a regular expression; EBNF; "" for json_object


def make_grammar(kind: GrammarKind, value: object = "", param: str | None = None) -> GrammarSpec:
    """The grammar of untrusted `value`: text, or a JSON value where the kind's text is JSON.

    InvalidRequestError names `param` if the value does not have the kind's form.
    """
    param = param or kind
    if kind == "json_object":
        return GrammarSpec(kind)
    if kind in ("json_schema", "choice", "structural_tag"):
        value = _json_text(kind, _parsed(value, param), param)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{param} is a {type(value).__name__}; send a string that is not empty", param)
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(
            f"{param} has {len(value)} characters, more than {MAX_GRAMMAR_LENGTH}; send a smaller grammar", param
        )
    _check_unicode(value, param)
    return GrammarSpec(kind, value)


def as_format(grammar: GrammarSpec) -> dict[str, Any]:
    """The grammar as a format of structural tags, in which it can follow another one: reasoning, for example."""
    match grammar.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            choices = json.loads(grammar.text)
            return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            return _format_of_tags(json.loads(grammar.text))


def _format_of_tags(structural_tag: dict[str, Any]) -> dict[str, Any]:
    """The format of a structural tag; older ones have `structures` and `triggers` in its place."""
    if "format" in structural_tag:
        format_: dict[str, Any] = structural_tag["format"]
        return format_
    tags = [
        {
            "type": "tag",
            "begin": part.get("begin"),
            "content": {"type": "json_schema", "json_schema": part.get("schema")},
            "end": part.get("end"),
        }
        for part in structural_tag.get("structures", [])
    ]
    return {"type": "triggered_tags", "triggers": structural_tag.get("triggers", []), "tags": tags}


def _parsed(value: object, param: str) -> object:
    """A JSON value that was sent as text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param) from None
    return parsed


def _json_text(kind: GrammarKind, value: object, param: str) -> str:
    if kind == "choice":
        are_texts = isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)
        is_valid = are_texts and bool(value)
        expected = "a list of one or more strings that are not empty"
    else:
        is_valid, expected = isinstance(value, Mapping), "a JSON object"
    if not is_valid:
        raise InvalidRequestError(f"{param} must be {expected}", param)
    try:
        _check_unicode(json.dumps(value, ensure_ascii=False), param)
        return json.dumps(value)
    except InvalidRequestError:  # a ValueError, too
        raise
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequestError(f"{param} is nested too deeply or holds values that are not JSON", param) from None


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} has an unpaired surrogate at character {error.start}; send valid Unicode text", param
        ) from None
