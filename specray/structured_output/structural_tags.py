"""Structural tags, in xgrammar's notation, as rules of llguidance.

Parts of a sequence that are regular become one lexeme together, because llguidance takes the longest of each. Text
before a tag ends where its trigger or its end first occurs.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from specray.errors import InvalidRequestError
from specray.structured_output.ebnf import lark_rules
from specray.structured_output.regular_expressions import literal, rust_regex
from specray.structured_output.schema import enforceable

Format = dict[str, Any]

MAX_DEPTH = 50
_ANY_TEXT = "/(?s:.*)/"
_EMPTY = '""'
# The members of each format beside `type`; True: required.
_MEMBERS: dict[str, dict[str, bool]] = {
    "const_string": {"value": True},
    "json_schema": {"json_schema": True, "style": False},
    "any_text": {"excludes": False},
    "regex": {"pattern": True},
    "grammar": {"grammar": True},
    "token": {"token": True},
    "sequence": {"elements": True},
    "or": {"elements": True},
    "optional": {"content": True},
    "plus": {"content": True},
    "star": {"content": True},
    "repeat": {"content": True, "min": True, "max": True},
    "tag": {"begin": True, "content": True, "end": True},
    "triggered_tags": {
        "triggers": True,
        "tags": True,
        "at_least_one": False,
        "stop_after_first": False,
        "excludes": False,
    },
    "tags_with_separator": {"tags": True, "separator": True, "at_least_one": False, "stop_after_first": False},
}


class RulePart(NamedTuple):
    """A format as text of a rule. If it is regular, the text may stand in a terminal as well."""

    text: str
    is_regular: bool


class TagRules:
    """Rules of one structural tag."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """`special_tokens` have text that is not spelled by others; tags name them by it."""
        self._special_tokens = special_tokens
        self._lines: list[str] = []
        self._depth = 0

    def rules(self, format_: object) -> list[str]:
        """The rules, of which the first is `start`. InvalidRequestError says what is malformed or not supported."""
        start = self._in_rule(self._part(format_, "format"))
        return [f"start: {start}", *self._lines]

    def _part(self, value: object, place: str) -> RulePart:
        format_ = _checked(value, place)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error(place, f"formats are nested more than {MAX_DEPTH} times")
        part = self._of_kind(format_, place)
        self._depth -= 1
        return part

    def _of_kind(self, format_: Format, place: str) -> RulePart:
        match format_["type"]:
            case "const_string":
                return self._constant(_text(format_["value"], f"{place}.value"))
            case "json_schema":
                return self._json(format_, place)
            case "any_text":
                return RulePart(_without(_texts(format_.get("excludes", []), f"{place}.excludes")), True)
            case "regex":
                return _regex(_text(format_["pattern"], f"{place}.pattern"), place)
            case "grammar":
                return self._grammar(_text(format_["grammar"], f"{place}.grammar"), place)
            case "token":
                return self._token(format_["token"], place)
            case "sequence":
                return self._joined(self._parts(format_["elements"], place))
            case "or":
                return self._either(self._parts(format_["elements"], place))
            case "optional":
                return self._repeated(format_, place, 0, 1)
            case "plus":
                return self._repeated(format_, place, 1, -1)
            case "star":
                return self._repeated(format_, place, 0, -1)
            case "repeat":
                return self._repeated(format_, place, format_["min"], format_["max"])
            case "tag":
                return self._tag(format_, place)
            case "triggered_tags":
                return self._triggered_tags(format_, place)
            case kind:
                assert kind == "tags_with_separator", kind
                return self._tags_with_separator(format_, place)

    def _parts(self, values: object, place: str) -> list[RulePart]:
        if not isinstance(values, list) or not values:
            raise _error(f"{place}.elements", "a list of one or more formats is expected")
        return [self._part(value, f"{place}.elements[{index}]") for index, value in enumerate(values)]

    def _constant(self, text: str) -> RulePart:
        """A text; where it contains a special token, that or its spelling."""
        for name, token in self._special_tokens.items():
            before, found, after = text.partition(name)
            if found:
                either = RulePart(f"({self._in_rule(_literal(name))} | <[{token}]>)", False)
                return self._joined([self._constant(before), either, self._constant(after)])
        return _literal(text)

    def _json(self, format_: Format, place: str) -> RulePart:
        if format_.get("style", "json") != "json":
            raise _error(place, f"the style {str(format_['style'])[:80]!r} is not supported; only 'json' is")
        return RulePart(json_part(format_["json_schema"]), False)

    def _grammar(self, grammar: str, place: str) -> RulePart:
        try:
            rules = lark_rules(grammar, f"g{len(self._lines)}_")
        except ValueError as error:
            raise _error(place, str(error)) from None
        self._lines += rules.lines
        return RulePart(rules.start, rules.is_regular)

    def _token(self, value: object, place: str) -> RulePart:
        token = self._special_tokens.get(value) if isinstance(value, str) else value
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise _error(f"{place}.token", f"{str(value)[:80]!r} is not the id or the text of a special token")
        return RulePart(f"<[{token}]>", False)

    def _joined(self, parts: Sequence[RulePart]) -> RulePart:
        """One part after the other. Regular neighbours become one terminal, so that no lexeme ends between them."""
        if all(part.is_regular for part in parts):
            return RulePart(" ".join(part.text for part in parts), True)
        texts = []
        for is_regular, group in groupby(parts, lambda part: part.is_regular):
            text = " ".join(part.text for part in group if part.text != _EMPTY)
            if text:
                texts.append(self._in_rule(RulePart(text, is_regular)))
        return RulePart(" ".join(texts), False)

    def _either(self, parts: Sequence[RulePart]) -> RulePart:
        is_regular = all(part.is_regular for part in parts)
        texts = [part.text if is_regular else self._in_rule(part) for part in parts]
        return RulePart(f"({' | '.join(texts)})", is_regular)

    def _repeated(self, format_: Format, place: str, least: object, most: object) -> RulePart:
        part = self._part(format_["content"], f"{place}.content")
        if not (isinstance(least, int) and isinstance(most, int) and least >= 0 and (most == -1 or least <= most)):
            raise _error(place, "'min' and 'max' are not a range of numbers; -1 as 'max' stands for no limit")
        return RulePart(f"({part.text}){{{least},{'' if most == -1 else most}}}", part.is_regular)

    def _in_rule(self, part: RulePart) -> str:
        """The part as text of a rule: a name of its own for what is regular."""
        if not part.is_regular or part.text == _EMPTY:
            return part.text
        return self._named(part.text, is_terminal=True)

    def _named(self, text: str, *, is_terminal: bool = False, is_lazy: bool = False) -> str:
        name = f"{'T' if is_terminal else 'r'}{len(self._lines)}"
        self._lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {text}")
        return name

    def _tag(self, format_: Format, place: str) -> RulePart:
        begin, end = self._mark(format_["begin"], f"{place}.begin"), format_["end"]
        return self._joined([begin, self._to_end(format_["content"], end, place)])

    def _mark(self, value: object, place: str) -> RulePart:
        if isinstance(value, dict):
            return self._part(value, place)
        return self._constant(_text(value, place))

    def _to_end(self, content: object, end: object, place: str) -> RulePart:
        """A tag's content and end. Any text ends with the first end."""
        ends = end if isinstance(end, list) and end else [end]
        part = self._part(content, f"{place}.content")
        is_text = isinstance(content, dict) and content["type"] == "any_text"
        if is_text and "" not in ends:
            return self._until(part, ends, f"{place}.end")
        return self._joined([part, self._either([self._mark(value, f"{place}.end") for value in ends])])

    def _until(self, text: RulePart, ends: Sequence[object], place: str) -> RulePart:
        """A text up to and with the first of these ends; those with special tokens may be spelled too."""
        marks = [self._mark(value, place) for value in ends]
        spelled = [_literal(value) for value in ends if isinstance(value, str)]
        choices = [self._named(f"{text.text} {self._either(spelled).text}", is_lazy=True)] if spelled else []
        choices += [f"{self._in_rule(text)} {mark.text}" for mark in marks if not mark.is_regular]
        return RulePart(f"({' | '.join(choices)})", False)

    def _tags(self, format_: Format, place: str) -> list[Format]:
        tags = format_["tags"]
        if not isinstance(tags, list) or not tags:
            raise _error(f"{place}.tags", "a list of one or more tags is expected")
        checked = [_checked(tag, f"{place}.tags[{index}]") for index, tag in enumerate(tags)]
        if any(tag["type"] != "tag" for tag in checked):
            raise _error(f"{place}.tags", "a list of formats of type 'tag' is expected")
        return checked

    def _triggered_tags(self, format_: Format, place: str) -> RulePart:
        triggers = _texts(format_["triggers"], f"{place}.triggers")
        if not triggers or "" in triggers:
            raise _error(f"{place}.triggers", "a list of one or more texts that are not empty is expected")
        text = RulePart(_without([*triggers, *_texts(format_.get("excludes", []), f"{place}.excludes")]), True)
        begun: dict[str, list[RulePart]] = {}
        for index, tag in enumerate(self._tags(format_, place)):
            place_ = f"{place}.tags[{index}]"
            begin = _text(tag["begin"], f"{place_}.begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise _error(f"{place_}.begin", f"{begin[:80]!r} does not begin with one of the triggers")
            rest = [self._constant(begin[len(trigger) :]), self._to_end(tag["content"], tag["end"], place_)]
            begun.setdefault(trigger, []).append(self._joined(rest))
        before = RulePart(_ANY_TEXT, True)
        tags = [
            f"{self._until(before, [trigger], place).text} {self._in_rule(self._either(parts))}"
            for trigger, parts in begun.items()
        ]
        tagged = self._named(" | ".join(tags))
        least = 1 if format_.get("at_least_one") else 0
        if format_.get("stop_after_first"):
            return RulePart(tagged if least else f"({tagged} | {self._in_rule(text)})", False)
        return RulePart(f"{tagged}{{{least},}} {self._in_rule(text)}", False)

    def _tags_with_separator(self, format_: Format, place: str) -> RulePart:
        parts = [self._tag(tag, f"{place}.tags[{index}]") for index, tag in enumerate(self._tags(format_, place))]
        tag = self._named(self._in_rule(self._either(parts)))
        separator = self._in_rule(self._constant(_text(format_["separator"], f"{place}.separator")))
        tags = tag if format_.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return RulePart(f"({tags})" if format_.get("at_least_one") else f"({tags})?", False)


def json_part(schema: object) -> str:
    """A JSON schema within a rule. `schema` is consumed."""
    return f"%json {json.dumps(enforceable(schema))}"


def _checked(value: object, place: str) -> Format:
    """A format of a known type that has the members of that type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _MEMBERS:
        raise _error(place, f"its type is {str(kind)[:80]!r}; expected one of {', '.join(_MEMBERS)}")
    members = _MEMBERS[kind]
    for name, member in value.items():
        if name != "type" and name not in members and member not in (None, False, [], ""):
            raise _error(place, f"the member {name[:80]!r} of {kind!r} is not supported")
    if missing := [name for name, is_required in members.items() if is_required and name not in value]:
        raise _error(place, f"{kind!r} has no member {missing[0]!r}")
    return value


def _literal(text: str) -> RulePart:
    return RulePart(f"/{literal(text)}/" if text else _EMPTY, True)


def _regex(pattern: str, place: str) -> RulePart:
    try:
        return RulePart(f"/{rust_regex(pattern)}/", True) if pattern else _literal("")
    except ValueError as error:
        raise _error(place, f"{pattern[:80]!r}: {error}") from None


def _without(excluded: Sequence[str]) -> str:
    """Any text that has none of these in it, as part of a terminal."""
    if not excluded:
        return _ANY_TEXT
    return f"({_ANY_TEXT} & ~/(?s:.*)(?:{'|'.join(map(literal, excluded))})(?s:.*)/)"


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _error(place, f"{str(value)[:80]} is not a string")
    return value


def _texts(value: object, place: str) -> list[str]:
    if not isinstance(value, list):
        raise _error(place, f"{str(value)[:80]} is not a list of strings")
    return [_text(item, place) for item in value]


def _error(place: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the structural tag cannot be compiled at {place[-200:]}: {reason}", "grammar")
