"""Fills in the tables of `docs/api.md` from the request bodies.

Usage: `python -m docs.tools.api_reference docs/api.md`. A table stands between `<!-- common -->`,
`<!-- fields NAME -->`, `<!-- refused -->` or `<!-- ignored -->` and `<!-- end -->`; the text around it is written by
hand. Fields that several endpoints share stand in the common table only.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from specray.server.anthropic.protocol import MessagesRequest
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.generate.protocol import GenerateRequest, GenerateSampling
from specray.server.responses.protocol import ResponsesRequest
from specray.server.routes.engine import AbortRequest
from specray.server.routes.tokenize import DetokenizeRequest, TokenizeRequest
from specray.server.schemas.body import Speculation
from specray.server.schemas.request_fields import GENERATION, HARMLESS, REFUSED

COMMAND = "python -m docs.tools.api_reference docs/api.md"
BODIES: Mapping[str, type[BaseModel]] = {
    body.__name__: body
    for body in (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        GenerateRequest,
        GenerateSampling,
        Speculation,
        TokenizeRequest,
        DetokenizeRequest,
        AbortRequest,
    )
}
LETTERS = {  # of the bodies that share fields
    "ChatRequest": "C",
    "CompletionRequest": "T",
    "ResponsesRequest": "R",
    "MessagesRequest": "M",
    "GenerateRequest": "G",
    "GenerateSampling": "S",
}
_MARKED = re.compile(r"(<!-- (common|fields \w+|refused|ignored) -->\n).*?(<!-- end -->)", re.DOTALL)
_RANGES = (  # the keys of a lower and an upper bound, and their unit
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " elements"),
    ("minProperties", "maxProperties", " keys"),
)
_POWERS = {-(2**63): "-2^63", 2**63 - 1: "2^63-1", 2**31 - 1: "2^31-1"}
_EXCLUSIVE = {"exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}"}

Json = dict[str, Any]


def filled(page: str) -> str:
    """The page with all its tables up to date."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n\n{match[3]}", page)


def fields_of(body: type[BaseModel]) -> Json:
    """The JSON schema of each field of a body."""
    schema: Json = body.model_json_schema()
    definitions = schema.get("$defs", {})
    return {name: _resolved(field, definitions) for name, field in schema["properties"].items()}


def _table(kind: str) -> str:
    name, _, argument = kind.partition(" ")
    lines = _TABLES[name](argument)
    return "\n".join(lines)


def _common(_: str) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for (field, values), letters in shared_fields().items():
        groups.setdefault((values, letters), []).append(f"`{field}`")
    rows = [f"| {', '.join(names)} | {values} | {letters} |" for (values, letters), names in groups.items()]
    return ["| fields | values | in |", "|---|---|---|", *rows]


def shared_fields() -> dict[tuple[str, str], str]:
    """The letters of the bodies that have a field with the same values, of all that several bodies have."""
    found: dict[tuple[str, str], str] = {}
    for name, letter in LETTERS.items():
        for field, schema in fields_of(BODIES[name]).items():
            key = (field, _values(schema))
            found[key] = found.get(key, "") + letter
    return {key: letters for key, letters in found.items() if len(letters) > 1}


def _fields(name: str) -> list[str]:
    shared = {key for key, letters in shared_fields().items() if LETTERS.get(name, "-") in letters}
    own = {field: _values(schema) for field, schema in fields_of(BODIES[name]).items()}
    rows = [f"| `{field}` | {values} |" for field, values in own.items() if (field, values) not in shared]
    return ["| field | values |", "|---|---|", *rows]


def _refused(_: str) -> list[str]:
    """Fields that no endpoint supports."""
    supported = {name for body in BODIES.values() for name in body.model_fields}
    values = {
        name: ", ".join(f"`{json.dumps(value)}`" for value in refusal.accepted) or "none"
        for name, refusal in (REFUSED | GENERATION).items()
        if name not in supported
    }
    return ["| accepted values, which turn a field off | fields |", "|---|---|", *_grouped(values)]


def _ignored(_: str) -> list[str]:
    return ["| why | fields |", "|---|---|", *_grouped(HARMLESS)]


def _grouped(columns: Mapping[str, str]) -> list[str]:
    """A row for each value, with the names that have it, in the order of the alphabet."""
    groups: dict[str, list[str]] = {}
    for name in sorted(columns):
        groups.setdefault(columns[name], []).append(f"`{name}`")
    return [f"| {value} | {', '.join(names)} |" for value, names in sorted(groups.items())]


_TABLES: dict[str, Callable[[str], list[str]]] = {
    "common": _common,
    "fields": _fields,
    "refused": _refused,
    "ignored": _ignored,
}


def _resolved(schema: Any, definitions: Json) -> Any:
    """A schema in which objects with a name are only named."""
    if isinstance(schema, list):
        return [_resolved(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return {"type": "object"} if target.get("type") == "object" else _resolved(target, definitions)
    return {key: _resolved(value, definitions) for key, value in schema.items()}


def _values(schema: Json) -> str:
    """The values that a field takes, in words. Null is always one and is left out."""
    if variants := schema.get("anyOf") or schema.get("oneOf"):
        words = [_values(variant) for variant in variants if variant.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of ({_values(schema.get('items', {}))})"
    limits = [text.format(_number(schema[key])) for key, text in _EXCLUSIVE.items() if key in schema]
    limits += [
        _range(schema.get(low), schema.get(high)) + unit for low, high, unit in _RANGES if schema.keys() & {low, high}
    ]
    return ", ".join([kind, *limits])


def _range(low: float | None, high: float | None) -> str:
    """A range with both ends, `0..1`, or the bound that there is."""
    if low is None or high is None:
        return f"≤ {_number(high)}" if low is None else f"≥ {_number(low)}"
    return f"{_number(low)}..{_number(high)}"


def _number(value: float | None) -> str:
    """A bound; those of machine integers as powers of two."""
    assert value is not None
    return _POWERS.get(int(value), f"{value:,.12g}")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
