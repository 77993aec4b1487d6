"""Mutations of JSON values and of bytes, drawn from a seeded generator."""

import json
import random
import string
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

# Values that are wrong, or right at an edge, in most places.
EVIL: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-45,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "a",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "😀" * 100,
    "<|im_end|>",
    "</s>",
    "../../etc/passwd",
    "{{ 7 * 7 }}",
    "%s%n",
    "a" * 5000,
    [],
    [[]],
    [None],
    [0] * 300,
    [-1, 2**40],
    ["a", 1],
    {},
    {"": 0},
    {"a": {"a": {"a": {}}}},
    {str(n): n for n in range(400)},
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
]
# Pieces of JSON that parsers disagree on.
TOKENS = [
    b"NaN",
    b"1e309",
    b"-",
    b"01",
    b"1" * 5000,
    b"\\ud800",
    b"\\u0000",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"//",
    b",,",
    b'"',
    b"\\",
    b"[" * 2000,
    b"{" * 2000,
    b'{"a":' * 500,
    b"\r\n",
    b"\xf0\x9f",
]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A copy of `value` with one to four changed places."""
    changed = {"": deepcopy(value)}  # a place for the whole value, too
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        container, key = rng.choice(list(_places(changed)))
        _change(container, key, rng)
    return changed.get("")


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to eight changes of bytes, spans or tokens."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 1, 2, 4, 16, 64)))
        match rng.randrange(6):
            case 0:
                changed[at:end] = b""
            case 1:
                changed[at:at] = rng.choice(TOKENS)
            case 2:
                changed[at:end] = rng.randbytes(end - at)
            case 3:
                changed[at:at] = changed[at:end] * rng.choice((1, 2, 50))
            case 4 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case _:
                del changed[at + rng.randrange(64) :]
    return bytes(changed)


def dumps(value: Any) -> bytes:
    """JSON that may be invalid: NaN, infinities, lone surrogates."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def from_schema(schema: dict[str, Any], root: dict[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """A value that mostly fits a JSON schema of `root`'s components, with edges of its bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return from_schema(root["components"]["schemas"][name], root, rng, depth)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return from_schema(rng.choice(choices), root, rng, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if rng.random() < 0.05:
        return rng.choice(EVIL)
    match schema.get("type"):
        case "integer" | "number":
            return _number(schema, rng)
        case "string":
            length = rng.choice((schema.get("minLength", 0), 1, 8, schema.get("maxLength", 20) + rng.randrange(2)))
            return "".join(rng.choices(string.ascii_letters + " \n<|>{}", k=min(length, 500)))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            count = 0 if depth > 4 else rng.choice((schema.get("minItems", 0), 1, 3))
            return [from_schema(schema.get("items", {}), root, rng, depth + 1) for _ in range(count)]
        case "object":
            return _object(schema, root, rng, depth)
        case "null":
            return None
    return rng.choice(EVIL)


def _number(schema: dict[str, Any], rng: random.Random) -> Any:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -10))
    high = schema.get("maximum", schema.get("exclusiveMaximum", 10))
    value = rng.choice((low, high, low + (high - low) * rng.random(), low - 1, high + 1, 1))
    return int(value) if schema["type"] == "integer" else value


def _object(schema: dict[str, Any], root: dict[str, Any], rng: random.Random, depth: int) -> dict[str, Any]:
    required = schema.get("required", [])
    share = 0.05 if depth > 4 else 0.3
    properties = schema.get("properties", {}).items()
    return {
        name: from_schema(part, root, rng, depth + 1)
        for name, part in properties
        if name in required or rng.random() < share
    }


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in pairs:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _change(container: Any, key: Any, rng: random.Random) -> None:
    value = container[key]
    match rng.randrange(5):
        case 0 if len(container) > 1:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice(("x", "", "stream", "n", "seed", "stop", "logprobs", "echo", "tools"))] = deepcopy(
                rng.choice(EVIL)
            )
        case 2 if isinstance(value, int | float) and not isinstance(value, bool):
            container[key] = rng.choice((value + 1, value - 1, -value, value * 1000, float(value), str(value)))
        case 3:
            container[key] = [value] * rng.choice((1, 2, 70)) if rng.random() < 0.5 else {"a": value}
        case _:
            container[key] = deepcopy(rng.choice(EVIL))
