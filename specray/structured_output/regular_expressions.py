"""Regular expressions of requests, in the syntax of llguidance, which is that of Rust's `regex` crate.

Requests write them as for ECMA-262 (JSON schemas) or Python. Where those two differ (`\\D`, `.`), a translated
expression matches only what both do, so that a complete output is valid for every validator.
"""

import re
import string

MAX_REPETITIONS = 100_000  # of one quantifier; llguidance cannot follow more
MAX_QUANTIFIERS = 1000  # of one expression; compiling takes time with their square

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x{9}-\x{d}\x{20}"}
_UNICODE = {
    "d": r"\p{Nd}",
    "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Cf}",
    "s": r"\p{White_Space}\x{1c}-\x{1f}\x{feff}",
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
# No set has the character 0. llguidance's sets of all control characters match quotes and backslashes in JSON strings
# as well, even those that exclude them.
_NUL = r"\x{0}"
_ANY = r"[^\x{a}\x{d}\x{2028}\x{2029}]"
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>)?")
_FLAGS = re.compile(r"\(\?([is]+)\)")


def literal(text: str) -> str:
    """The expression of one text."""
    return "".join(map(_escaped, text))


def rust_regex(pattern: str) -> str:
    """The translation. ValueError says what is not supported."""
    return _Translation(pattern).result()


class _Translation:
    """One pass over an expression."""

    def __init__(self, pattern: str) -> None:
        flags = _FLAGS.match(pattern)
        self._flags = flags[1] if flags else ""
        self._text = pattern
        self._at = flags.end() if flags else 0
        self._num_quantifiers = 0

    def result(self) -> str:
        parts = []
        while self._at < len(self._text):
            parts.append(self._part())
        text = "".join(parts)
        return f"(?i:{text})" if "i" in self._flags else text

    def _part(self) -> str:
        if (quantifier := _QUANTIFIER.match(self._text, self._at)) is not None:
            return self._quantifier(quantifier)
        char = self._next()
        match char:
            case ".":
                return "(?s:.)" if "s" in self._flags else _ANY
            case "|" | ")" | "^" | "$":
                return char
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case _:
                return _escaped(char)

    def _quantifier(self, quantifier: re.Match[str]) -> str:
        """Whether it is lazy makes no difference to what the expression matches."""
        if max(int(count or 0) for count in (quantifier[1], quantifier[3])) > MAX_REPETITIONS:
            raise ValueError(f"{quantifier[0]} repeats more than {MAX_REPETITIONS} times")
        self._num_quantifiers += 1
        if self._num_quantifiers > MAX_QUANTIFIERS:
            raise ValueError(f"it has more than {MAX_QUANTIFIERS} quantifiers")
        self._at = quantifier.end()
        if self._text.startswith("?", self._at):
            self._at += 1
        elif self._text.startswith("+", self._at):
            raise ValueError(f"the possessive quantifier {quantifier[0]}+ is not supported")
        return quantifier[0]

    def _group(self) -> str:
        group = _GROUP.match(self._text, self._at - 1)
        assert group is not None
        if group[1] is None and self._text.startswith("?", self._at):
            kind = self._text[self._at - 1 : self._at + 3]
            raise ValueError(f"{kind!r} is not supported: look-ahead, look-behind and flags inside the expression")
        self._at = group.end()
        return "(?:"

    def _escape(self) -> str:
        """What follows a backslash outside a class."""
        char = self._peek()
        if char in ("A", "Z"):
            self._at += 1
            return "^" if char == "A" else "$"
        if char.lower() in _ASCII:
            self._at += 1
            return f"[{_ASCII[char]}]" if char.islower() else f"[^{_UNICODE[char.lower()]}{_NUL}]"
        if (code := self._property()) is not None:
            return f"[{code}&&[^{_NUL}]]"
        return _escaped(self._escaped_char())

    def _property(self) -> str | None:
        found = _PROPERTY.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return f"\\{found[0]}"

    def _escaped_char(self) -> str:
        """The character of an escape that stands for one."""
        char = self._peek()
        if (code := _HEX.match(self._text, self._at)) is not None:
            self._at = code.end()
            value = int(code[1] or code[2] or code[3], 16)
            low = _LOW_SURROGATE.match(self._text, self._at)
            if 0xD800 <= value < 0xDC00 and low is not None:
                self._at = low.end()
                value = 0x10000 + ((value - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            if 0xD800 <= value < 0xE000 or value > 0x10FFFF:
                raise ValueError(f"\\{code[0]} is not a character")
            return chr(value)
        self._at += 1
        if char == "c" and self._peek() in string.ascii_letters:
            self._at += 1
            return chr(ord(self._text[self._at - 1]) & 31)
        if char in _CONTROLS and not (char == "0" and self._text[self._at : self._at + 1].isdigit()):
            return chr(_CONTROLS[char])
        if char.isascii() and char.isalnum():
            kind = "a back-reference" if char.isdigit() else "an escape"
            raise ValueError(f"\\{char} is {kind} that is not supported")
        return char

    def _class(self) -> str:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        if self._text.startswith("]", self._at):
            raise ValueError("a class that begins with ] has different meanings; write \\]")
        items: list[str] = []
        has_controls = False
        while self._peek() != "]":
            start = self._class_item(is_negated)
            is_range = self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at)
            if is_range and len(start) == 1:
                self._at += 1
                end = self._class_item(is_negated)
                if len(end) != 1 or end < start:
                    raise ValueError(f"the range {start}-{end} in a class has no end")
                has_controls = has_controls or start < " "
                items.append(f"{_escaped(start)}-{_escaped(end)}")
            else:
                has_controls = has_controls or len(start) > 1
                items.append(_escaped(start) if len(start) == 1 else start)
        self._at += 1
        members = "".join(items)
        if is_negated:
            return f"[^{members}{_NUL}]"
        return f"[[{members}]&&[^{_NUL}]]" if has_controls else f"[{members}]"

    def _class_item(self, is_negated: bool) -> str:
        """A character, or the text of a set of them, which has more than one character."""
        char = self._next()
        if char != "\\":
            return char
        kind = self._peek()
        if kind.lower() in _ASCII:
            self._at += 1
            # A negated class matches less if what it excludes is more.
            sets = _UNICODE if kind.islower() == is_negated else _ASCII
            return sets[kind] if kind.islower() else f"[^{sets[kind.lower()]}]"
        if (code := self._property()) is not None:
            return code
        if kind == "b":
            self._at += 1
            return "\b"
        return self._escaped_char()

    def _peek(self) -> str:
        if self._at >= len(self._text):
            raise ValueError("it ends within a class or after a backslash")
        return self._text[self._at]

    def _next(self) -> str:
        char = self._peek()
        self._at += 1
        return char


def _escaped(char: str) -> str:
    """The character outside and inside a class, and within the slashes of llguidance's grammars."""
    return char if (char.isascii() and char.isalnum()) or char in " _" else f"\\x{{{ord(char):x}}}"
