"""Grammars in EBNF as requests write them (GBNF, as in llama.cpp and xgrammar), as rules of llguidance.

llguidance divides text into lexemes, of which it takes the longest; EBNF has none. A grammar without recursion is
therefore one lexeme, a regular expression; the rules of others consist of lexemes of one character.
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from specray.structured_output.regular_expressions import MAX_QUANTIFIERS, MAX_REPETITIONS, literal

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_DEFINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*::=")
_QUANTIFIER = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^xuU])", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
ROOT = "root"
MAX_DEPTH = 100  # of parentheses
MAX_RULES = 1000  # llguidance follows them by recursion


class Characters(NamedTuple):
    """A text, as regular expressions of its characters."""

    expressions: tuple[str, ...]


class Rule(NamedTuple):
    name: str


class Sequence(NamedTuple):
    items: "tuple[Item, ...]"


class Choice(NamedTuple):
    items: "tuple[Item, ...]"


class Repeated(NamedTuple):
    item: "Item"
    least: int
    most: int | None


Item = Characters | Rule | Sequence | Choice | Repeated


class LarkRules(NamedTuple):
    """Rules of llguidance."""

    start: str  # the name of the first
    lines: list[str]
    is_regular: bool  # the rules are terminals


def lark_rules(grammar: str, prefix: str) -> LarkRules:
    """The rules of a grammar; their names begin with `prefix`.

    ValueError says what is malformed, or which rule has no finite text.
    """
    rules = _Parser(grammar).rules()
    if ROOT not in rules:
        raise ValueError("it has no rule named 'root'")
    finite = _finite(rules)
    if ROOT not in finite:
        raise ValueError(f"no finite text matches: the rule {_endless(rules, finite)!r} requires itself without end")
    rules = _reached({name: _finite_part(item, finite) for name, item in rules.items() if name in finite})
    is_regular = not _is_recursive(rules)
    names = {name: f"{prefix}{index}" for index, name in enumerate(rules)}
    if is_regular:
        names = {name: terminal.upper() for name, terminal in names.items()}
    lines = [f"{names[name]}: {_lark(item, names, is_regular)}" for name, item in rules.items()]
    return LarkRules(names[ROOT], lines, is_regular)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._num_quantifiers = 0

    def rules(self) -> dict[str, Item]:
        rules: dict[str, Item] = {}
        self._skip(_SPACE)
        while self._at < len(self._text):
            name = self._skip(_NAME)
            if not name or not self._skip(_DEFINES):
                raise self._error("a rule such as root ::= ... is expected")
            if name in rules:
                raise ValueError(f"the rule {name!r} is defined twice")
            rules[name] = self._choice()
        if len(rules) > MAX_RULES:
            raise ValueError(f"it has {len(rules)} rules, more than {MAX_RULES}")
        undefined = {used for item in rules.values() for used in _used(item)} - rules.keys()
        if undefined:
            raise ValueError(f"the rule {min(undefined)!r} is not defined")
        return rules

    def _choice(self) -> Item:
        items = [self._sequence()]
        while self._accept("|"):
            items.append(self._sequence())
        return Choice(tuple(items)) if len(items) > 1 else items[0]

    def _sequence(self) -> Item:
        items: list[Item] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return Sequence(tuple(items))

    def _item(self) -> Item | None:
        self._skip(_SPACE)
        char = self._text[self._at : self._at + 1]
        if char in ("", "|", ")"):
            return None
        if char == '"':
            return Characters(tuple(map(literal, self._quoted())))
        if char == "[":
            return Characters((self._class(),))
        if char == ".":
            self._at += 1
            return Characters(("(?s:.)",))
        if char == "(":
            return self._group()
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"{char!r} is not expected")
        if _DEFINES.match(self._text, name.end()):
            return None  # the next rule
        self._at = name.end()
        return Rule(name[0])

    def _group(self) -> Item:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parentheses are open")
        item = self._choice()
        if not self._accept(")"):
            raise self._error("')' is expected")
        self._depth -= 1
        return item

    def _repeated(self, item: Item) -> Item:
        self._skip(_SPACE)
        while (found := _QUANTIFIER.match(self._text, self._at)) is not None:
            self._at = found.end()
            self._num_quantifiers += 1
            if self._num_quantifiers > MAX_QUANTIFIERS:
                raise self._error(f"there are more than {MAX_QUANTIFIERS} quantifiers")
            match found[0]:
                case "*":
                    least, most = 0, None
                case "+":
                    least, most = 1, None
                case "?":
                    least, most = 0, 1
                case _:
                    least = int(found[1])
                    most = (int(found[3]) if found[3] else None) if found[2] else least
            if max(least, most or 0) > MAX_REPETITIONS or (most is not None and most < least):
                raise self._error(f"{found[0]} is not a number of repetitions up to {MAX_REPETITIONS}")
            item = Repeated(item, least, most)
            self._skip(_SPACE)
        return item

    def _quoted(self) -> Iterator[str]:
        self._at += 1
        while not self._accept_here('"'):
            yield self._character()

    def _class(self) -> str:
        self._at += 1
        is_negated = self._accept_here("^")
        parts = []
        while not self._accept_here("]"):
            first = last = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character()
                if last < first:
                    raise self._error(f"the range {first}-{last} is empty")
            parts.append(f"{literal(first)}-{literal(last)}")
        if not parts:
            if is_negated:
                return "(?s:.)"
            raise self._error("the class [] is empty")
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _character(self) -> str:
        if self._at >= len(self._text):
            raise self._error('it ends within "..." or [...]')
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            raise self._error("the escape is incomplete")
        self._at = found.end()
        if found[4] is not None:
            return _CONTROLS.get(found[4], found[4])
        value = int(found[1] or found[2] or found[3], 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise self._error(f"\\{found[0]} is not a character")
        return chr(value)

    def _accept(self, char: str) -> bool:
        self._skip(_SPACE)
        return self._accept_here(char)

    def _accept_here(self, char: str) -> bool:
        is_next = self._text.startswith(char, self._at)
        self._at += is_next
        return is_next

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _error(self, reason: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        return ValueError(f"line {line}, before {self._text[self._at : self._at + 20]!r}: {reason}")


def _used(item: Item) -> Iterator[str]:
    """The rules that an item names."""
    match item:
        case Rule(name):
            yield name
        case Sequence(items) | Choice(items):
            for part in items:
                yield from _used(part)
        case Repeated(part):
            yield from _used(part)


def _finite(rules: dict[str, Item]) -> set[str]:
    """The rules that match a finite text."""
    finite: set[str] = set()
    while more := {name for name, item in rules.items() if name not in finite and _is_finite(item, finite)}:
        finite |= more
    return finite


def _is_finite(item: Item, finite: Collection[str]) -> bool:
    match item:
        case Rule(name):
            return name in finite
        case Sequence(items):
            return all(_is_finite(part, finite) for part in items)
        case Choice(items):
            return any(_is_finite(part, finite) for part in items)
        case Repeated(part, least):
            return least == 0 or _is_finite(part, finite)
    return True


def _endless(rules: dict[str, Item], finite: Collection[str]) -> str:
    """A rule that requires itself, on the way from the root."""
    name, seen = ROOT, set[str]()
    while name not in seen:
        seen.add(name)
        name = next(used for used in _used(rules[name]) if used not in finite)
    return name


def _finite_part(item: Item, finite: Collection[str]) -> Item:
    """A finite item without alternatives and repetitions that are not."""
    match item:
        case Sequence(items):
            return Sequence(tuple(_finite_part(part, finite) for part in items))
        case Choice(items):
            return Choice(tuple(_finite_part(part, finite) for part in items if _is_finite(part, finite)))
        case Repeated(part, least, most):
            is_finite = _is_finite(part, finite)
            return Repeated(_finite_part(part, finite), least, most) if is_finite else Sequence(())
    return item


def _reached(rules: dict[str, Item]) -> dict[str, Item]:
    """The rules that the root uses, and those that these use."""
    reached: dict[str, Item] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = rules[name]
            waiting += _used(rules[name])
    return reached


def _is_recursive(rules: dict[str, Item]) -> bool:
    left = {name: set(_used(item)) for name, item in rules.items()}
    while ready := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in ready}
    return bool(left)


def _lark(item: Item, names: dict[str, str], is_regular: bool) -> str:
    match item:
        case Characters(expressions):
            lexemes = ["".join(expressions)] if is_regular else expressions
            return " ".join(f"/{lexeme}/" for lexeme in lexemes if lexeme) or '""'
        case Rule(name):
            return names[name]
        case Sequence(items):
            return " ".join(_lark(part, names, is_regular) for part in items) or '""'
        case Choice(items):
            return f"({' | '.join(_lark(part, names, is_regular) for part in items)})"
        case Repeated(part, least, most):
            return f"({_lark(part, names, is_regular)}){{{least},{'' if most is None else most}}}"
