"""Reads values as models write them, JSON or Python literals, and writes them as JSON while they arrive.

What is written is valid JSON whatever is read: other quotes, raw control characters, `True`, missing or additional
commas and brackets are corrected. Only text that a limit has cut stays incomplete, so that nobody takes what is there
for a whole value.
"""

import json
import re
from collections.abc import Mapping

from specray.server.model_output.reader import Emit, NotACallError, Reader, Reading, ignore

MAX_DEPTH = 64  # of brackets; what is nested more deeply is left out

_GAP = re.compile(r"[\s,]*")
_WORD = re.compile(r"[-+.\w]*")
_STRING_PARTS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_OPENINGS = {"{": "{", "[": "[", "(": "["}  # as read -> as written
_CLOSINGS = {"}": "}", "]": "]", ")": "]"}
_CLOSING_OF = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_DECIMAL = re.compile(r"-?(\d{0,300}\.\d{1,300}|\d{1,300}\.)", re.ASCII)  # as Python also writes it, such as `5.`
_MAX_DIGITS = 4000  # Python's json refuses integers of more than 4,300
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("true", "True"), "true"),
    **dict.fromkeys(("false", "False"), "false"),
    **dict.fromkeys(("null", "None", "undefined", "NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "null"),
}
_QUOTES = "\"'"
_STRING_MARK = '<|"|>'  # Gemma 4's, around strings in which nothing is escaped
_SAME_ESCAPES = '"\\/bfnrt'
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}  # digits
_SECOND_HALF = r"\\u([dD][c-fC-F][0-9a-fA-F]{2})"
_HALF = "\ufffd"  # written for half of a surrogate pair


def copy_value(reader: Reader, emit: Emit) -> Reading[None]:
    """Emit one value as JSON. NotACallError if there is none, or if a limit cut it."""
    yield from _Copy(reader, emit).run()


def read_string(reader: Reader) -> Reading[str]:
    """The value of one string."""
    parts: list[str] = []
    if (yield from reader.peek()) not in _STRING_PARTS:
        raise NotACallError
    yield from copy_value(reader, parts.append)
    value: str = json.loads("".join(parts))
    return value


def read_object(reader: Reader, emit: Emit) -> Reading[None]:
    """Emit one JSON object: the one that follows, or the one whose text follows as a string; `{}` for null and "".

    NotACallError if another value follows.
    """
    if (yield from reader.peek()) == "{":
        yield from copy_value(reader, emit)
        return
    parts: list[str] = []
    yield from copy_value(reader, parts.append)
    emit(_as_object("".join(parts)))


def _as_object(text: str) -> str:
    """The JSON text of the object that the JSON text of another value stands for."""
    value = json.loads(text)
    inner = value.strip() if isinstance(value, str) else None
    if value in (None, []) or inner in ("", "null", "None"):
        return "{}"
    if inner is None or not inner.startswith("{"):
        raise NotACallError
    reader, parts, rest = Reader(), list[str](), list[str]()
    reader.feed(inner)
    reader.end()
    for reading in (copy_value(reader, parts.append), reader.rest(rest.append)):
        next(reading, None)  # all text is there, so nothing waits for more
    if any(rest):
        raise NotACallError
    return "".join(parts)


class _Copy:
    """One value on its way from the reader to JSON. No recursion, so that hostile nesting costs linear time."""

    def __init__(self, reader: Reader, emit: Emit) -> None:
        self._reader = reader
        self._emit = emit
        self._open: list[str] = []  # closing brackets of the containers around the reader's place, innermost last
        self._separator = ""  # before the next item of the innermost container

    def run(self) -> Reading[None]:
        if not (yield from self._value()):
            raise NotACallError
        while self._open:
            if not (yield from self._next()):  # what follows is no part of a value, so the value ends here
                self._refuse_cut()
                self._emit("".join(reversed(self._open)))
                return

    def _next(self) -> Reading[bool]:
        """Read one closing bracket or one item of the innermost container. False if neither follows."""
        yield from self._reader.run(_GAP, ignore)
        char = yield from self._reader.peek()
        if char in _CLOSINGS:
            yield from self._reader.expect(char)
            self._close(_CLOSINGS[char])
            return True
        return (yield from (self._member() if self._open[-1] == "}" else self._value()))

    def _close(self, bracket: str) -> None:
        """Close the innermost container with this bracket and those inside; a bracket without one is left out."""
        while bracket in self._open:
            closed = self._open.pop()
            self._emit(closed)
            self._separator = ", "
            if closed == bracket:
                return

    def _member(self) -> Reading[bool]:
        """Read a key and its value, which is null if it is missing. False if no key follows."""
        quote = yield from self._quote()
        if quote:
            self._emit(self._separator)
            yield from self._string(quote)
        elif word := (yield from self._word()):
            self._emit(self._separator + json.dumps(word, ensure_ascii=False))
        else:
            return False
        yield from self._reader.skip_space()
        yield from self._reader.accept(":")
        yield from self._reader.skip_space()
        self._emit(": ")
        self._separator = ""
        if not (yield from self._value()):
            self._refuse_cut()
            self._emit("null")
            self._separator = ", "
        return True

    def _value(self) -> Reading[bool]:
        """Read a value, or the opening bracket of one. False if neither follows."""
        char = yield from self._reader.peek()
        separator, self._separator = self._separator, ", "
        if char in _OPENINGS and len(self._open) < MAX_DEPTH:
            yield from self._reader.expect(char)
            self._emit(separator + _OPENINGS[char])
            self._open.append(_CLOSING_OF[_OPENINGS[char]])
            self._separator = ""
        elif quote := (yield from self._quote()):
            self._emit(separator)
            yield from self._string(quote)
        elif word := (yield from self._word()):
            self._emit(separator + _scalar(word))
        else:
            self._separator = separator
            return False
        return True

    def _word(self) -> Reading[str]:
        word: list[str] = []
        yield from self._reader.run(_WORD, word.append)
        if any(word) and not (yield from self._reader.peek()):
            self._refuse_cut()  # the word may have gone on
        return "".join(word)

    def _quote(self) -> Reading[str]:
        """What opens the string that follows; "" if none does."""
        char = yield from self._reader.peek()
        if char == _STRING_MARK[0] and (yield from self._reader.peek(len(_STRING_MARK))) == _STRING_MARK:
            return _STRING_MARK
        return char if char in _STRING_PARTS else ""

    def _string(self, quote: str) -> Reading[None]:
        yield from self._reader.expect(quote)
        self._emit('"')
        if quote == _STRING_MARK:
            if (yield from self._reader.through((quote,), self._characters)) is None:
                self._refuse_cut()
            self._emit('"')
            return
        while True:
            yield from self._reader.run(_STRING_PARTS[quote], self._characters)
            if not (yield from self._reader.accept("\\")):
                if not (yield from self._reader.accept(quote)):
                    self._refuse_cut()
                self._emit('"')
                return
            yield from self._escape()

    def _characters(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self) -> Reading[None]:
        """Read what follows a backslash."""
        char = yield from self._reader.peek()
        yield from self._reader.expect(char)
        if not char:
            self._refuse_cut()
            self._characters("\\")
        elif char in _HEX_ESCAPES:
            yield from self._hex_escape(char)
        elif char in _SAME_ESCAPES:
            self._emit("\\" + char)
        elif char != "\n":  # Python's continuation of a line
            self._characters(char if char in _QUOTES else "\\" + char)

    def _hex_escape(self, char: str) -> Reading[None]:
        """Read the digits of a character's number, and the second half of a surrogate pair after a first one."""
        code = yield from self._digits(_HEX_ESCAPES[char])
        if code is None:
            self._characters("\\" + char)
            return
        if 0xD800 <= code < 0xDC00 and (pair := re.fullmatch(_SECOND_HALF, (yield from self._reader.peek(6)))):
            yield from self._reader.expect(pair[0])
            code = 0x10000 + ((code - 0xD800) << 10) + int(pair[1], 16) - 0xDC00
        self._characters(_HALF if code > 0x10FFFF or 0xD800 <= code < 0xE000 else chr(code))

    def _digits(self, count: int) -> Reading[int | None]:
        digits = yield from self._reader.peek(count)
        if not re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits):
            return None
        yield from self._reader.expect(digits)
        return int(digits, 16)

    def _refuse_cut(self) -> None:
        if self._reader.is_cut:
            raise NotACallError


def _scalar(word: str) -> str:
    """The JSON text of a number or of a word, which becomes a string if it has no other meaning."""
    if word in _WORDS:
        return _WORDS[word]
    number = word.removeprefix("+")
    if _NUMBER.fullmatch(number) and len(number) <= _MAX_DIGITS:
        return number
    if _DECIMAL.fullmatch(number):
        return json.dumps(float(number))
    return json.dumps(word, ensure_ascii=False)
