"""Which parts of a JSON schema have finite values.

A part that requires itself (`{"properties": {"x": {"$ref": "#"}}, "required": ["x"]}`) has none: an output that enters
it never ends. What a value needs follows from all the schemas that apply to it, so values are told apart by their sets
of schemas.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from specray.errors import InvalidRequestError

Schema = dict[str, Any]
Places = frozenset[str]  # JSON pointers of the schemas that apply to one value, with those that they refer to

MAX_VALUES = 5000
_SCALARS = {"null", "boolean", "integer", "number", "string"}


class _Need(NamedTuple):
    """Values of which one must be finite."""

    place: str  # its schema's place, for messages
    choices: list[Places]


def endless_places(parts: dict[str, Schema], at: Callable[[str], object]) -> set[str]:
    """The places of `parts` without a finite value. InvalidRequestError if the root "#" is one of them.

    The references of `parts` are places; `at` gives the value at any.
    """
    if not any("$ref" in part for part in parts.values()):
        return set()  # nothing comes up again
    values = _Values(parts, at)
    starts = {place: values.applying([place]) for place in parts}
    values.add_all([start for start in starts.values() if start is not None])
    finite = values.finite()
    endless = {place for place, start in starts.items() if start is None or start not in finite}
    root = starts.get("#")
    if root is not None and root not in finite:
        place = values.endless_place(root, finite)
        raise InvalidRequestError(
            f"no finite value matches the JSON schema: {place} requires itself without end", "grammar"
        )
    return endless - {"#"}


class _Values:
    """The values of a schema, each with its needs."""

    def __init__(self, parts: dict[str, Schema], at: Callable[[str], object]) -> None:
        self._parts = parts
        self._at = at
        self._needs: dict[Places, list[_Need]] = {}

    def add_all(self, waiting: list[Places]) -> None:
        """Add values and what they need, and so on."""
        while waiting:
            value = waiting.pop()
            if value in self._needs:
                continue
            if len(self._needs) >= MAX_VALUES:
                raise InvalidRequestError(
                    f"the JSON schema combines its parts in more than {MAX_VALUES} ways; use fewer anyOf within allOf",
                    "grammar",
                )
            self._needs[value] = needs = self._needs_of(value)
            waiting += [choice for need in needs for choice in need.choices]

    def finite(self) -> set[Places]:
        """The values that end: the least solution, found by going over all until nothing changes."""
        finite: set[Places] = set()
        waiting = list(self._needs.items())
        while True:
            left = []
            for value, needs in waiting:
                if all(any(choice in finite for choice in need.choices) for need in needs):
                    finite.add(value)
                else:
                    left.append((value, needs))
            if len(left) == len(waiting):
                return finite
            waiting = left

    def endless_place(self, value: Places, finite: set[Places]) -> str:
        """The place on the way from a value without end at which a value comes up again."""
        place, seen = "#", set[Places]()
        while value not in seen:
            seen.add(value)
            need = next(n for n in self._needs[value] if not any(choice in finite for choice in n.choices))
            place = need.place
            if not need.choices:
                break
            value = need.choices[0]
        return place

    def applying(self, places: list[str]) -> Places | None:
        """All schemas that apply where these do; None if one of them allows nothing."""
        found: set[str] = set()
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place in found:
                continue
            found.add(place)
            part = self._parts.get(place)
            if part is None:
                if self._at(place) is False:
                    return None
                continue
            waiting += branches(place, part, "allOf")
            if "$ref" in part:
                waiting.append(part["$ref"])
        return frozenset(found)

    def _needs_of(self, value: Places) -> list[_Need]:
        parts = [(place, self._parts[place]) for place in sorted(value) if place in self._parts]
        for place, part in parts:
            for name in ("anyOf", "oneOf"):
                options = branches(place, part, name)
                if options and not value.intersection(options):
                    return [self._need(f"{place}/{name}", [[*value, option] for option in options])]
        if any("enum" in part or "const" in part for _, part in parts):
            return []
        types = {"object", "array", *_SCALARS}
        for _, part in parts:
            if "type" in part:
                kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
                types &= {*kinds, *(["integer"] if "number" in kinds else [])}
        if not types or types & _SCALARS:
            return []
        needs = [list(self._of_array(parts))] if "array" in types else []
        needs += [list(self._of_object(parts))] if "object" in types else []
        return min(needs, key=len)

    def _of_array(self, parts: list[tuple[str, Schema]]) -> Iterator[_Need]:
        num_items = max(part.get("minItems", 0) for _, part in parts)
        num_known = max(len(part.get("prefixItems", ())) for _, part in parts)
        for index in range(min(num_items, num_known + 1)):
            places = [
                f"{place}/prefixItems/{index}" if index < len(part.get("prefixItems", ())) else f"{place}/items"
                for place, part in parts
                if index < len(part.get("prefixItems", ())) or "items" in part
            ]
            if places:
                yield self._need(places[0], [places])

    def _of_object(self, parts: list[tuple[str, Schema]]) -> Iterator[_Need]:
        required = list(dict.fromkeys(str(name) for _, part in parts for name in part.get("required", ())))
        for name in required:
            places = self._of_property(parts, name)
            if places:
                yield self._need(places[0], [places])
        if max(part.get("minProperties", 0) for _, part in parts) > len(required):
            names = {name for _, part in parts for name in part.get("properties", ())} - set(required)
            others = [f"{place}/additionalProperties" for place, part in parts if "additionalProperties" in part]
            if not any("patternProperties" in part for _, part in parts):
                choices = [self._of_property(parts, name) for name in sorted(names)]
                yield self._need(f"{parts[0][0]}/minProperties", [*choices, others])

    def _of_property(self, parts: list[tuple[str, Schema]], name: str) -> list[str]:
        """The places of the schemas of a property."""
        places = []
        for place, part in parts:
            if name in part.get("properties", ()):
                places.append(f"{place}/properties/{escaped(name)}")
            elif "additionalProperties" in part and "patternProperties" not in part:
                places.append(f"{place}/additionalProperties")
        return places

    def _need(self, place: str, choices: list[list[str]]) -> _Need:
        applying = map(self.applying, choices)
        return _Need(place, [choice for choice in applying if choice is not None])


def escaped(name: str) -> str:
    """A key as a part of a JSON pointer within a URI."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def branches(place: str, part: Schema, name: str) -> list[str]:
    """The places of a list of schemas."""
    return [f"{place}/{name}/{index}" for index in range(len(part.get(name, ())))]
