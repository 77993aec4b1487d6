"""200 JSON schemas for structured output, made from the keywords of the JSON-Schema-Test-Suite that are enforced.

They are built here, from a seed, and are not those of the suite. Every output is finite: small models often repeat
themselves without end in recursive references, fractions of a second and parts of an address, so these are left out.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

NUM_SCHEMAS = 200
_NAMES = ("name", "age", "city", "kind", "score", "tags", "active", "parent", "id", "date", "note", "level")
_WORDS = ("red", "green", "blue", "low", "high", "admin", "guest", "north", "south", "yes", "no")
_PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]{1,7}$", "^[0-9]{3}-[0-9]{4}$", "^(cat|dog|bird)$", "^#[0-9a-f]{6}$")
_FORMATS = ("date", "uuid", "ipv4")


def schemas(count: int = NUM_SCHEMAS, seed: int = 0) -> list[Schema]:
    """Different schemas, the same ones for a seed."""
    random = Random(seed)
    made: dict[str, Schema] = {}
    while len(made) < count:
        schema = _KINDS[len(made) % len(_KINDS)](random, 2)
        made[json.dumps(schema)] = schema
    return list(made.values())


def _integer(random: Random, depth: int) -> Schema:
    del depth
    low = random.randint(-50, 50)
    bounds: list[Schema] = [
        {"minimum": low, "maximum": low + random.randint(0, 900)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + random.randint(2, 60)},
        {"minimum": 0, "maximum": 60, "multipleOf": random.choice((2, 5, 7))},
    ]
    return {"type": "integer", **random.choice(bounds)}


def _number(random: Random, depth: int) -> Schema:
    del depth
    low = random.randint(-9, 9)
    return {"type": "number", "minimum": low, "maximum": low + random.choice((1, 2.5, 40))}


def _string(random: Random, depth: int) -> Schema:
    del depth
    least = random.randint(0, 4)
    bounds: list[Schema] = [
        {"minLength": least, "maxLength": least + random.randint(1, 20)},
        {"pattern": random.choice(_PATTERNS)},
        {"format": random.choice(_FORMATS)},
    ]
    return {"type": "string", **random.choice(bounds)}


def _constant(random: Random, depth: int) -> Schema:
    del depth
    values: list[Any] = [*_WORDS, *range(9), True, None, 1.5]
    chosen = random.sample(values, random.randint(1, 5))
    return random.choice([{"enum": chosen}, {"const": chosen[0]}, {"type": "string", "enum": list(_WORDS[:3])}])


def _simple(random: Random, depth: int) -> Schema:
    del depth
    return random.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"enum": [True, None]}])


def _array(random: Random, depth: int) -> Schema:
    least = random.randint(0, 2)
    if random.random() < 0.3:
        items = [_any(random, depth) for _ in range(least + 1)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"type": "array", "items": _any(random, depth), "minItems": least, "maxItems": least + random.randint(0, 3)}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(_NAMES, random.randint(1, 4))
    required = names[: random.randint(1, len(names))]
    extra: Schema = random.choice(
        [{}, {"additionalProperties": False}, {"title": "Record", "description": "One record."}]
    )
    properties = {name: _any(random, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, **extra}


def _map(random: Random, depth: int) -> Schema:
    bounds: Schema = {"minProperties": 1, "maxProperties": random.randint(1, 3)}
    names: Schema = {"propertyNames": {"type": "string", "pattern": "^[a-z]{1,5}$"}}
    return {"type": "object", "additionalProperties": _any(random, depth), **bounds, **random.choice([{}, names])}


def _alternatives(random: Random, depth: int) -> Schema:
    if random.random() < 0.5:
        return {"anyOf": [_any(random, depth) for _ in range(random.randint(1, 3))]}
    tagged = [
        {
            "type": "object",
            "properties": {"kind": {"const": word}, "value": _any(random, depth)},
            "required": ["kind", "value"],
        }
        for word in random.sample(_WORDS, 2)
    ]
    return random.choice([{"oneOf": tagged}, {"oneOf": [_integer(random, 0), _string(random, 0)]}])


def _reference(random: Random, depth: int) -> Schema:
    """Definitions that refer to each other."""
    name = random.choice(_NAMES)
    leaf = {"type": "object", "properties": {name: _any(random, depth)}, "required": [name]}
    node = {
        "type": "object",
        "properties": {
            "left": {"$ref": "#/$defs/leaf"},
            "right": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["left", "right"],
    }
    root: Schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "required": ["first"]}
    return {"$defs": {"leaf": leaf, "node": node}, **random.choice([root, {"allOf": [{"$ref": "#/$defs/node"}]}])}


def _any(random: Random, depth: int) -> Schema:
    """A schema inside another one: no references, whose definitions lie at the root."""
    if depth == 0:
        return random.choice(_LEAVES)(random, 0)
    return random.choice([*_LEAVES, _array, _object, _alternatives])(random, depth - 1)


_LEAVES: list[Callable[[Random, int], Schema]] = [_integer, _number, _string, _constant, _simple]
_KINDS: list[Callable[[Random, int], Schema]] = [
    _object,
    _array,
    _map,
    _alternatives,
    _reference,
    _object,
    _integer,
    _number,
    _string,
    _constant,
]
