"""Refuses JSON schemas with parts that the compiled grammar would not enforce.

xgrammar ignores some keywords and some combinations. An output that breaks them would end with `stop` and yet be
invalid, so a schema is accepted only if every output of its grammar is valid. Annotations and unknown keywords change
nothing and are accepted. `format` is an annotation in JSON Schema; those that xgrammar knows are enforced in form.
"""

from collections.abc import Iterator
from typing import Any

from specray.errors import InvalidRequestError

Schema = dict[str, Any]

NOT_ENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "minContains",
        "maxContains",
        "additionalItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
# Keywords of which a schema may have one, and with it only annotations (and `type`, next to enum and const).
ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
OF_TYPE = {
    "minimum": {"integer", "number"},
    "maximum": {"integer", "number"},
    "exclusiveMinimum": {"integer", "number"},
    "exclusiveMaximum": {"integer", "number"},
    "multipleOf": {"integer", "number"},
    "minLength": {"string"},
    "maxLength": {"string"},
    "pattern": {"string"},
    "minItems": {"array"},
    "maxItems": {"array"},
    "prefixItems": {"array"},
    "items": {"array"},
    "unevaluatedItems": {"array"},
    "uniqueItems": {"array"},
    "minProperties": {"object"},
    "maxProperties": {"object"},
    "required": {"object"},
    "properties": {"object"},
    "patternProperties": {"object"},
    "additionalProperties": {"object"},
    "unevaluatedProperties": {"object"},
    "propertyNames": {"object"},
}
_MAPS, _LISTS = ("properties", "patternProperties", "$defs", "definitions"), ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def check_schema(schema: object) -> None:
    """InvalidRequestError names the first part that would not be enforced, and its place in the schema."""
    for place, part in _subschemas(schema):
        if (reason := _not_enforced(part, schema)) is not None:
            raise InvalidRequestError(f"the JSON schema cannot be enforced at {place}: {reason}", "grammar")


def _subschemas(schema: object) -> Iterator[tuple[str, Schema]]:
    """Every schema in `schema`, with its JSON pointer; without recursion, which a deep schema would exhaust."""
    waiting = [("#", schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict):
            continue  # true, false, or something that the compiler refuses
        yield place, part
        for name in _MAPS:
            if isinstance(part.get(name), dict):
                waiting += [(f"{place}/{name}/{key}", value) for key, value in part[name].items()]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                waiting += [(f"{place}/{name}/{index}", value) for index, value in enumerate(part[name])]
        waiting += [(f"{place}/{name}", part[name]) for name in _SINGLE if name in part]


def _not_enforced(part: Schema, root: object) -> str | None:
    if refused := sorted(NOT_ENFORCED.intersection(part)):
        return f"{refused[0]!r} is not supported; leave it out"
    if part.get("uniqueItems"):
        return "'uniqueItems' is not supported; leave it out"
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        return "'pattern' excludes 'minLength' and 'maxLength'; put the length into the pattern, as in '^[a-z]{2,8}$'"
    reference = part.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        return f"'$ref' to {str(reference)[:80]!r} is not in the same schema; put the definition into '$defs'"
    return _unenforced_type(part) or _unenforced_combination(part, root) or _unenforced_object(part)


def _unenforced_type(part: Schema) -> str | None:
    """Keywords without the `type` that they belong to would be ignored."""
    for name, types in OF_TYPE.items():
        if name in part and not types.intersection(_types(part)):
            return f'{name!r} has no effect without "type": "{sorted(types)[0]}" beside it; add it'
    return None


def _unenforced_combination(part: Schema, root: object) -> str | None:
    present = [name for name in ALTERNATIVES if name in part]
    if not present:
        return None
    first, others = present[0], [*present[1:], *(name for name in OF_TYPE if name in part)]
    if others:
        return f"{first!r} and {others[0]!r} in one schema are not combined; write them into one of the two"
    if "type" in part:
        values = part["enum"] if first == "enum" else [part["const"]] if first == "const" else None
        if not isinstance(values, list) or not all(_is_of_type(value, _types(part)) for value in values):
            return f"{first!r} and 'type' in one schema are not combined; write the type into {first!r}"
    if first == "allOf" and not (isinstance(part["allOf"], list) and len(part["allOf"]) == 1):
        return "'allOf' of several schemas is not supported; merge them"
    if first == "oneOf" and not _are_disjoint(part["oneOf"], root):
        return (
            "the schemas of 'oneOf' may overlap; use 'anyOf', or give each another type or, as objects, a required "
            "property with another 'const'"
        )
    return None


def _unenforced_object(part: Schema) -> str | None:
    required, properties = part.get("required"), part.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return None  # the compiler reports what is malformed
    missing = [name for name in required if name not in properties]
    return f"'required' names {missing[0]!r}, which is not in 'properties'; add it there" if missing else None


def _are_disjoint(parts: object, root: object) -> bool:
    """Whether no value can match two of the schemas: by their types, or by a property that tells objects apart."""
    if not isinstance(parts, list):
        return False
    branches = [_resolved(part, root) for part in parts]
    types = [kind for branch in branches for kind in set(_types(branch))]
    has_types = all(_types(branch) for branch in branches) and not {"integer", "number"} <= set(types)
    if has_types and len(set(types)) == len(types):
        return True
    tags = [_constants(branch) for branch in branches]
    names = set(tags[0]).intersection(*tags) if tags else set()
    return any(len({repr(values[name]) for values in tags}) == len(tags) for name in names)


def _resolved(part: object, root: object) -> Schema:
    """The schema, or the one that its local reference names."""
    reference = part.get("$ref") if isinstance(part, dict) else None
    if isinstance(reference, str):
        part = root
        for name in reference.split("/")[1:]:
            part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else {}


def _constants(part: Schema) -> Schema:
    """The required properties of an object whose values are constant."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {
        name: value["const"]
        for name, value in properties.items()
        if name in required and isinstance(value, dict) and "const" in value
    }


def _types(part: Schema) -> list[str]:
    """The types that the grammar has; without `type`, the compiler goes by these two keywords."""
    if "type" not in part:
        return ["object"] if "properties" in part else ["array"] if "items" in part else []
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return [kind for kind in kinds if isinstance(kind, str)]


def _is_of_type(value: object, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _PYTHON_TYPES.get(kind, ())) for kind in kinds)
