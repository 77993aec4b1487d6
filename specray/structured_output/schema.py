"""JSON schemas in a form that llguidance enforces in full, or an error that names what cannot be enforced.

A prepared schema means the same as the client's or less: every value that it allows is valid. It differs where
llguidance would ignore a keyword, reads it differently, or allows what validators refuse after rounding. Annotations
and unknown keywords change nothing.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from specray.errors import InvalidRequestError
from specray.structured_output.finite_values import branches, endless_places, escaped
from specray.structured_output.regular_expressions import rust_regex

Schema = dict[str, Any]

NOT_ENFORCED = (
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
    "$dynamicRef",
    "$recursiveRef",
)
_DROPPED = ("$schema", "$dynamicAnchor", "$recursiveAnchor", "$anchor", "x-guidance", "contentMediaType")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
ENFORCED_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Formats of JSON Schema that are not enforced. All others are annotations, for validators as well.
OTHER_FORMATS = frozenset(
    {
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    }
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # divisible by 4, 400
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
# In place of llguidance's, which allow the 29th of February in every year and a 60th second in every minute.
_FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
MAX_DEPTH = 100  # of JSON pointers
MAX_REFERENCES = 500  # llguidance follows them by recursion
_EXACT = 2**53  # integers up to here are floating-point numbers
_LARGEST = 2**63 - 1024  # the largest integer that is a floating-point number and has 64 bits
_LARGEST_DIVISOR = 10_000  # llguidance has a state for each remainder
_LARGEST_MULTIPLE = 10**9 - 1  # where nothing else bounds them


_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ESCAPES = 'nrbtf\\"'  # of characters in JSON texts
_NUMERIC = re.compile(r"(?<!\\)(?:\\\\)*\\u00|\x7f")  # in JSON: control characters without escapes of their own


class _UnenforceableError(Exception):
    """Why a schema cannot be enforced; the message continues the schema's place."""


def enforceable(schema: object) -> Schema:
    """The prepared schema, with the form of its JSON: one space after commas and colons, no other white space.

    InvalidRequestError names the part that cannot be enforced, and its place. `schema` is consumed: it must be a JSON
    value that nobody else has.
    """
    if not isinstance(schema, dict):
        raise _error("#", "it is not an object")
    return _Preparation(schema).result()


def parts_by_place(schema: Schema) -> dict[str, Schema]:
    """The schemas within a schema that can be enforced, by their JSON pointers."""
    parts: dict[str, Schema] = {}
    waiting: list[tuple[str, object]] = [("#", schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, dict):
            parts[place] = part
            for name in (*_MAPS, *_LISTS, *_SINGLE):
                value = part.get(name)
                if name in _MAPS and isinstance(value, dict):
                    waiting += [(f"{place}/{name}/{escaped(key)}", child) for key, child in value.items()]
                elif isinstance(value, list):
                    waiting += [(f"{place}/{name}/{index}", child) for index, child in enumerate(value)]
                else:
                    waiting.append((f"{place}/{name}", value))
    return parts


class _Preparation:
    """Changes a schema in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._parts: dict[str, Schema] = {}  # by JSON pointer
        self._id = root.pop("$id", None) or root.pop("id", None)

    def result(self) -> Schema:
        anchors: dict[str, str] = {}
        waiting = ["#"]
        while waiting:  # without recursion, which a deep schema would exhaust
            place = waiting.pop()
            part = self._at(place)
            if place in self._parts or not isinstance(part, dict):
                continue  # true, false, or something that llguidance refuses
            if place.count("/") > MAX_DEPTH:
                raise _error(place, f"it is nested more than {MAX_DEPTH} times")
            self._parts[place] = part
            if isinstance(anchor := part.get("$anchor"), str):
                anchors[anchor] = place
            self._rewrite(place, part)
            waiting += _children(place, part)
            if isinstance(target := part.get("$ref"), str) and target.startswith("#/"):
                waiting.append(target)
        for place, part in self._parts.items():
            self._resolve_anchor(place, part, anchors)
            for name in _DROPPED:
                part.pop(name, None)
        if sum("$ref" in part for part in self._parts.values()) > MAX_REFERENCES:
            raise _error("#", f"it has more than {MAX_REFERENCES} references")
        self._refuse_circles()
        self._close_objects()
        self._root["x-guidance"] = _JSON_FORM | {"json_allowed_escapes": _ESCAPES + self._numeric_escape()}
        for place in sorted(endless_places(self._parts, self._at), key=len, reverse=True):
            above, _, name = place.rpartition("/")
            container = self._at(above)
            if isinstance(container, list):
                container[int(name)] = False
            elif isinstance(container, dict):
                container[unescaped(name)] = False
        return self._root

    def _at(self, place: str) -> object:
        """The value that a JSON pointer names."""
        value: object = self._root
        for name in place.split("/")[1:]:
            key = unescaped(name)
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise _error(place, "'$ref' names this place, where there is nothing")
        return value

    def _rewrite(self, place: str, part: Schema) -> None:
        try:
            for rewrite in _REWRITES:
                rewrite(part)
            self._localize_reference(part)
            if place != "#" and isinstance(part.get("$id"), str):
                raise _UnenforceableError(
                    "'$id' of a part is not supported; refer to it by its place, as '#/$defs/name'"
                )
        except _UnenforceableError as error:
            raise _error(place, str(error)) from None

    def _localize_reference(self, part: Schema) -> None:
        """References become JSON pointers with one spelling; those to anchors do when all anchors are known."""
        reference = part.get("$ref")
        if reference is None:
            return
        if isinstance(self._id, str):
            reference = reference.removeprefix(self._id.removesuffix("#")) or "#"
        if not reference.startswith("#"):
            raise _UnenforceableError(f"'$ref' to {reference[:80]!r} is not in the same schema; put it into '$defs'")
        names = reference[1:].split("/")
        part["$ref"] = reference if names[0] else "/".join(["#", *(escaped(unescaped(name)) for name in names[1:])])

    def _resolve_anchor(self, place: str, part: Schema, anchors: dict[str, str]) -> None:
        reference = part.get("$ref", "#")
        if reference == "#" or reference.startswith("#/"):
            return
        if (target := anchors.get(unquote(reference[1:]))) is None:
            raise _error(place, f"'$ref' to {reference[:80]!r} names an anchor that the schema does not have")
        part["$ref"] = target

    def _refuse_circles(self) -> None:
        """A schema that applies itself to the same value says nothing, and validators do not return."""
        num_left = dict.fromkeys(self._parts, 0)
        applied_by: dict[str, list[str]] = {place: [] for place in self._parts}
        for place, part in self._parts.items():
            for target in _combined_with(place, part):
                if target in self._parts:
                    num_left[place] += 1
                    applied_by[target].append(place)
        waiting = [place for place, count in num_left.items() if not count]
        while waiting:
            for place in applied_by[waiting.pop()]:
                num_left[place] -= 1
                if not num_left[place]:
                    waiting.append(place)
        for place, count in num_left.items():
            if count:
                raise _error(place, "it applies itself to the same value, by '$ref' or allOf, anyOf or oneOf")

    def _close_objects(self) -> None:
        """Objects with `properties` have no others, unless the schema says what they are, or other parts may add some.

        JSON Schema allows any others. A model that may add properties often does, without end.
        """
        combined = self._combined_places()
        for place, part in self._parts.items():
            is_open = "additionalProperties" in part or "patternProperties" in part
            if "properties" in part and not is_open and place not in combined:
                part["properties"] |= {
                    name: True for name in part.get("required", ()) if name not in part["properties"]
                }
                part["additionalProperties"] = False

    def _numeric_escape(self) -> str:
        """`u` if a constant can be written only with it.

        Otherwise characters have no numeric escapes, with which a known name would pass as another one.
        """
        constants = [part[name] for part in self._parts.values() for name in ("const", "enum") if name in part]
        if not any(_NUMERIC.search(json.dumps(constant, ensure_ascii=False)) for constant in constants):
            return ""
        for place, part in self._parts.items():
            has_names = "properties" in part or "patternProperties" in part
            if has_names and part.get("additionalProperties", True) is not False:
                raise _error(
                    place, "it allows other properties, and 'const' or 'enum' of the schema have control characters"
                )
        return "u"

    def _combined_places(self) -> set[str]:
        """The schemas that apply to a value together with others."""
        combined: set[str] = set()
        waiting = []
        for place, part in self._parts.items():
            targets = _combined_with(place, part)
            constraints = [name for name in part if name in _COMBINED or name in _OF_OBJECTS]
            if len(constraints) > 1 and targets:
                combined.add(place)
                waiting += targets
            elif len(part.get("allOf", ())) > 1:
                waiting += targets
        while waiting:
            place = waiting.pop()
            if place not in combined and place in self._parts:
                combined.add(place)
                waiting += _combined_with(place, self._parts[place])
        return combined


_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")


def _combined_with(place: str, part: Schema) -> list[str]:
    """The places of the schemas that apply to the same value as this one."""
    places = [target for name in ("allOf", "anyOf", "oneOf") for target in branches(place, part, name)]
    return places + ([part["$ref"]] if "$ref" in part else [])


def _children(place: str, part: Schema) -> Iterator[str]:
    for name in _MAPS:
        if isinstance(part.get(name), dict):
            yield from (f"{place}/{name}/{escaped(key)}" for key in part[name])
    for name in _LISTS:
        yield from branches(place, part, name)
    yield from (f"{place}/{name}" for name in _SINGLE if name in part)


def unescaped(name: str) -> str:
    return unquote(name).replace("~1", "/").replace("~0", "~")


def _error(place: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema cannot be enforced at {place[:200]}: {reason}", "grammar")


def _check_forms(part: Schema) -> None:
    """Refuse keywords with malformed values; the other checks rely on this."""
    for name, value in part.items():
        is_form, form = _FORMS.get(name, (None, ""))
        if is_form is not None and not is_form(value):
            raise _UnenforceableError(f"{name!r} is {str(value)[:80]}, not {form}")
        if name in _COUNTS:
            part[name] = int(value)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and int(value) == value


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


_FORMS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(_MAPS, (_is_map, "an object of schemas")),
    **dict.fromkeys(_LISTS, (lambda value: bool(value) and _are_schemas(value), "a list of one or more schemas")),
    **dict.fromkeys(_SINGLE, (_is_schema, "a schema")),
    **dict.fromkeys(_COUNTS, (_is_count, "an integer that is not negative")),
    "items": (lambda value: _is_schema(value) or _are_schemas(value), "a schema"),
    "required": (_are_texts, "a list of strings"),
    "type": (lambda value: isinstance(value, str) or _are_texts(value), "a string or a list of strings"),
    "enum": (lambda value: bool(value) and isinstance(value, list), "a list of one or more values"),
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "$ref": (lambda value: isinstance(value, str), "a string"),
}


def _refuse_keywords(part: Schema) -> None:
    for name in NOT_ENFORCED:
        if name in part:
            raise _UnenforceableError(f"{name!r} is not supported; leave it out")
    if part.get("uniqueItems") and part.get("maxItems") not in (0, 1):
        raise _UnenforceableError("'uniqueItems' is not supported; leave it out")
    part.pop("uniqueItems", None)


def _rewrite_items(part: Schema) -> None:
    """Older drafts write `prefixItems` as a list of `items`, and what follows as `additionalItems`."""
    if isinstance(part.get("items"), list) and part["items"]:
        part["prefixItems"] = part.pop("items")
        if "additionalItems" in part:
            part["items"] = part["additionalItems"]
    part.pop("additionalItems", None)
    _rename_unevaluated(part, "unevaluatedItems", "items")


def _rewrite_objects(part: Schema) -> None:
    _rename_unevaluated(part, "unevaluatedProperties", "additionalProperties")
    if "propertyNames" in part:
        _rewrite_property_names(part)
    if "patternProperties" in part:
        patterns = part["patternProperties"].items()
        part["patternProperties"] = {_translated("patternProperties", name): value for name, value in patterns}
    at_least = part.get("minProperties", 0)
    if at_least > len(set(part.get("required", ()))) + 1:
        raise _UnenforceableError(
            f"'minProperties' of {at_least} is not supported, because names may repeat; name {at_least - 1} of the "
            "properties in 'required'"
        )


def _rename_unevaluated(part: Schema, name: str, evaluated: str) -> None:
    """Without schemas beside it that evaluate more, `unevaluated…` means the same as the usual keyword."""
    if name not in part:
        return
    if any(other in part for other in _COMBINED):
        raise _UnenforceableError(f"{name!r} beside $ref, allOf, anyOf or oneOf is not supported; leave it out")
    value = part.pop(name)
    part.setdefault(evaluated, value)


def _rewrite_property_names(part: Schema) -> None:
    """Names that match are properties of `patternProperties`; there are no others."""
    names = part.pop("propertyNames")
    if names is True or names == {}:
        return
    if any(name in part for name in ("properties", "patternProperties", "required", *_COMBINED)):
        raise _UnenforceableError("'propertyNames' beside 'properties' is not supported; leave it out")
    pattern = _pattern_of_names(names) if isinstance(names, dict) else None
    if pattern is None:
        raise _UnenforceableError("'propertyNames' is supported with one of pattern, enum and const; leave it out")
    part["patternProperties"] = {pattern: part.get("additionalProperties", True)}
    part["additionalProperties"] = False


def _pattern_of_names(names: Schema) -> str | None:
    match [(name, value) for name, value in names.items() if name not in ("type", "title", "description")]:
        case [("pattern", str(pattern))]:
            return pattern
        case [("enum", list(values))] if all(isinstance(value, str) for value in values):
            return f"^(?:{'|'.join(map(re.escape, values))})$"
        case [("const", str(value))]:
            return f"^{re.escape(value)}$"
    return None


def _rewrite_strings(part: Schema) -> None:
    if "pattern" in part:
        part["pattern"] = _translated("pattern", part["pattern"])
    if "format" not in part:
        return
    kind, types = part["format"], _types(part)
    is_text = not types or "string" in types
    if is_text and kind in OTHER_FORMATS:
        raise _UnenforceableError(f"'format' {kind!r} is not supported; leave it out, or give a 'pattern'")
    if not is_text or kind not in ENFORCED_FORMATS:
        del part["format"]
    elif (pattern := _FORMAT_PATTERNS.get(kind)) is not None:
        del part["format"]
        if "pattern" in part:
            part.setdefault("allOf", []).append({"pattern": pattern})
        else:
            part["pattern"] = pattern


def _translated(keyword: str, pattern: str) -> str:
    try:
        return rust_regex(pattern)
    except ValueError as error:
        raise _UnenforceableError(f"{keyword!r} is {pattern[:80]!r}: {error}") from None


def _rewrite_numbers(part: Schema) -> None:
    """At most one bound on each side, which belongs to the range: one that does not may be reached by rounding."""
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(part.get(exclusive), bool) and part.pop(exclusive) and name in part:  # the fourth draft
            part[exclusive] = part.pop(name)
    lower = _strictest(part, "minimum", "exclusiveMinimum", 1)
    upper = _strictest(part, "maximum", "exclusiveMaximum", -1)
    if "multipleOf" in part:
        lower, upper = _bounds_of_multiples(_number(part, "multipleOf"), lower, upper)
    types = _types(part)
    bounds = _integer_bounds if "integer" in types and "number" not in types else _number_bounds
    low, high = bounds(lower, upper)
    is_empty = lower is not None and upper is not None and (lower[0], lower[1] or upper[1]) >= (upper[0], True)
    if is_empty or (low is not None and high is not None and low > high):
        raise _UnenforceableError(f"no {'integer' if bounds is _integer_bounds else 'number'} lies between its bounds")
    part |= {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}


_Bound = tuple[Decimal, bool] | None  # the value, and whether it is excluded


def _strictest(part: Schema, inclusive: str, exclusive: str, sign: int) -> _Bound:
    """The strictest of two keywords, which are taken out. `sign` is 1 for lower bounds, -1 for upper ones."""
    bounds = [
        (Decimal(repr(_number(part, name))), name == exclusive) for name in (inclusive, exclusive) if name in part
    ]
    for name in (inclusive, exclusive):
        part.pop(name, None)
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]), default=None)


def _bounds_of_multiples(multiple: float, lower: _Bound, upper: _Bound) -> tuple[_Bound, _Bound]:
    """Multiples without a bound stay short: a long number is a multiple only with its last digit."""
    if multiple > _LARGEST_DIVISOR:
        raise _UnenforceableError(f"'multipleOf' {multiple} is above {_LARGEST_DIVISOR}; leave it out")
    limit = Decimal(_LARGEST_MULTIPLE)
    if _is_fraction(multiple):
        if Decimal(multiple) != Decimal(repr(multiple)):
            raise _UnenforceableError(
                f"'multipleOf' {multiple} is not exact in floating point, so validators disagree about its multiples; "
                "use an integer, or a fraction such as 0.5 or 0.25"
            )
        lower = max(lower or (-limit, False), (-limit, False))  # multiples beyond would be rounded
        upper = min(upper or (limit, False), (limit, False))
    if lower is None and (upper is None or upper[0] >= -limit):
        lower = (-limit, False)
    if upper is None and (lower is None or lower[0] <= limit):
        upper = (limit, False)
    return lower, upper


def _integer_bounds(lower: _Bound, upper: _Bound) -> tuple[int | None, int | None]:
    """The outermost integers that llguidance can compare: floating-point numbers of 64 bits."""
    low = high = None
    if lower is not None:
        low = math.floor(lower[0]) + 1 if lower[1] else math.ceil(lower[0])
        low = max(-_LARGEST, _as_float(low, math.inf))
    if upper is not None:
        high = math.ceil(upper[0]) - 1 if upper[1] else math.floor(upper[0])
        high = min(_LARGEST, _as_float(high, -math.inf))
    if (low is not None and low > _LARGEST) or (high is not None and high < -_LARGEST):
        raise _UnenforceableError("its bounds allow only integers of more than 64 bits")
    return low, high


def _as_float(value: int, towards: float) -> int:
    """The nearest integer in that direction that is a floating-point number."""
    if abs(value) <= _EXACT:
        return value
    nearest = float(min(max(value, -(10**300)), 10**300))
    if (int(nearest) < value) if towards > 0 else (int(nearest) > value):
        nearest = math.nextafter(nearest, towards)
    return int(nearest)


def _number_bounds(lower: _Bound, upper: _Bound) -> tuple[float | None, float | None]:
    """Excluded bounds become the numbers a little inside."""
    width = upper[0] - lower[0] if lower is not None and upper is not None else None
    return _inside(lower, width, 1), _inside(upper, width, -1)


def _inside(bound: _Bound, width: Decimal | None, sign: int) -> float | int | None:
    if bound is None:
        return None
    value, is_excluded = bound
    if is_excluded:
        step = max(abs(value), Decimal(1)) * Decimal("1e-9")
        value += sign * (step if width is None else min(step, abs(width) / 1000))
    if value == value.to_integral_value() and abs(value) <= _EXACT:
        return int(value)
    rounded = float(value)
    if sign * Decimal(rounded) < sign * value:
        rounded = math.nextafter(rounded, sign * math.inf)
    return rounded


def _number(part: Schema, name: str) -> float:
    value = part[name]
    if not _is_number(value):
        raise _UnenforceableError(f"{name!r} is {str(value)[:80]}, not a number")
    return value


def _is_fraction(value: float) -> bool:
    return isinstance(value, float) and not value.is_integer()


def _check_constants(part: Schema) -> None:
    """Integers in constants are written as floating-point numbers."""
    waiting = [part.get("const"), part.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and abs(value) > _EXACT:
            raise _UnenforceableError(f"the integer {str(value)[:40]} has more than 53 bits; write it as a string")


def _types(part: Schema) -> list[str]:
    """The types that a schema names; none means all."""
    kinds = part.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _check_forms,
    _refuse_keywords,
    _rewrite_items,
    _rewrite_objects,
    _rewrite_strings,
    _rewrite_numbers,
    _check_constants,
)
