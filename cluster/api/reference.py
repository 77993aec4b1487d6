"""Fills in the tables of `docs/api.md` from the request bodies.

Usage: `python -m cluster.api.reference docs/api.md`. A table stands between `<!-- fields NAME -->`, `<!-- refused -->`
or `<!-- ignored -->` and `<!-- end -->`; the text around it is written by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.api.anthropic.protocol import MessagesRequest
from cluster.api.completion_protocol import CompletionRequest
from cluster.api.engine_routes import AbortRequest
from cluster.api.generate_protocol import GenerateRequest, GenerateSampling
from cluster.api.protocol import ChatRequest, Speculation
from cluster.api.request_fields import GENERATION, HARMLESS, REFUSED
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.tokenize import DetokenizeRequest, TokenizeRequest

COMMAND = "python -m cluster.api.reference docs/api.md"
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
_MARKED = re.compile(r"(<!-- (fields \w+|refused|ignored) -->\n).*?(<!-- end -->)", re.DOTALL)
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} elements",
    "maxItems": "≤ {} elements",
    "maxProperties": "≤ {} keys",
}

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


def _fields(name: str) -> list[str]:
    rows = [f"| `{field}` | {_values(schema)} |" for field, schema in fields_of(BODIES[name]).items()]
    return ["| field | values |", "|---|---|", *rows]


def _refused(_: str) -> list[str]:
    rows = [
        f"| `{name}` | {', '.join(f'`{json.dumps(value)}`' for value in refusal.accepted) or 'none'} |"
        for name, refusal in sorted((REFUSED | GENERATION).items())
    ]
    return ["| field | accepted values, which turn it off |", "|---|---|", *rows]


def _ignored(_: str) -> list[str]:
    return ["| field | why |", "|---|---|", *(f"| `{name}` | {reason} |" for name, reason in sorted(HARMLESS.items()))]


_TABLES: dict[str, Callable[[str], list[str]]] = {"fields": _fields, "refused": _refused, "ignored": _ignored}


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
    limits = [text.format(f"{schema[key]:,.12g}") for key, text in _BOUNDS.items() if key in schema]
    return ", ".join([kind, *limits])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
