"""Reading Python literals: strings, numbers, True, False, None, lists, tuples and dictionaries. None is evaluated."""

import json
import re
from collections.abc import Callable, Mapping

from cluster.api.model_output.reader import NotACallError, Reader, Reading

MAX_DEPTH = 32

_WORD = re.compile(r"[-+.\w]*")
_STRING_PARTS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}  # digits


def read_literal(reader: Reader, depth: int = 0) -> Reading[object]:
    """The value of one literal. NotACallError if there is none, or if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise NotACallError
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first in _STRING_PARTS:
        return (yield from _read_string(reader, first))
    if first == "{":
        return (yield from _read_dict(reader, depth))
    if first in ("[", "("):
        return (yield from _read_list(reader, depth, "]" if first == "[" else ")"))
    word: list[str] = []
    yield from reader.run(_WORD, word.append)
    return _word_value("".join(word))


def _read_list(reader: Reader, depth: int, close: str) -> Reading[list[object]]:
    items: list[object] = []

    def read_item() -> Reading[None]:
        items.append((yield from read_literal(reader, depth + 1)))

    yield from _read_items(reader, close, read_item)
    return items


def _read_dict(reader: Reader, depth: int) -> Reading[dict[str, object]]:
    items: dict[str, object] = {}

    def read_item() -> Reading[None]:
        key = yield from read_literal(reader, depth + 1)
        yield from reader.skip_space()
        yield from reader.expect(":")
        if not isinstance(key, str):  # JSON has no other keys
            raise NotACallError
        items[key] = yield from read_literal(reader, depth + 1)

    yield from _read_items(reader, "}", read_item)
    return items


def _read_items(reader: Reader, close: str, read_item: Callable[[], Reading[None]]) -> Reading[None]:
    """Read items separated by commas, from the opening bracket to the closing one."""
    yield from reader.expect((yield from reader.peek()))
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(close)):
            return
        yield from read_item()
        yield from reader.skip_space()
        if (yield from reader.peek()) != close:
            yield from reader.expect(",")


def _read_string(reader: Reader, quote: str) -> Reading[str]:
    parts: list[str] = []
    yield from reader.expect(quote)
    while True:
        yield from reader.run(_STRING_PARTS[quote], parts.append)
        if (yield from reader.accept(quote)):
            return "".join(parts)
        yield from reader.expect("\\")
        parts.append((yield from _read_escape(reader)))


def _read_escape(reader: Reader) -> Reading[str]:
    char = yield from reader.peek()
    yield from reader.expect(char)
    if not char:
        raise NotACallError
    if char not in _HEX_ESCAPES:
        return _ESCAPES.get(char, "\\" + char)
    digits = yield from reader.peek(_HEX_ESCAPES[char])
    if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_ESCAPES[char]}}}", digits):
        raise NotACallError
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:  # no character, or half of one
        raise NotACallError
    yield from reader.expect(digits)
    return chr(code)


def _word_value(word: str) -> object:
    if word in _WORDS:
        return _WORDS[word]
    if not word or not (word[0].isdecimal() or word[0] == "-"):
        raise NotACallError
    try:
        return json.loads(word)
    except ValueError:
        raise NotACallError from None
