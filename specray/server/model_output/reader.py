"""A text that arrives in pieces, read by generators that wait for more.

A scanner written with these operations decides by characters alone, never by how they were split into pieces. Each
character is looked at a bounded number of times, so scanning takes linear time.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Reading = Generator[None, None, Value]  # yields whenever it needs more text
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class NotACallError(Exception):
    """The text that was being read as a tool call is not one."""


class Reader:
    """The unread part of a text, and the characters read since `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_ended = False
        self.is_cut = False  # it has ended where a limit cut it, not by itself
        self._marked: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, is_cut: bool = False) -> None:
        """No more text follows; `is_cut` if a limit ended it."""
        self._is_ended = True
        self.is_cut = is_cut

    def mark(self) -> None:
        """Keep what is read from here on, for `marked`."""
        self._marked = []

    def marked(self) -> str:
        """The text read since `mark`, which this ends."""
        text = "".join(self._marked or [])
        self._marked = None
        return text

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters; fewer at the end of the text."""
        while len(self._text) - self._position < count and not self._is_ended:
            yield
        return self._text[self._position : self._position + count]

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if the text continues with it."""
        while not self._is_ended and literal.startswith(unread := self._text[self._position :]) and unread != literal:
            yield
        if not self._text.startswith(literal, self._position):
            return False
        self._take(self._position + len(literal))
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`. NotACallError if the text does not continue with it."""
        if not (yield from self.accept(literal)):
            raise NotACallError

    def skip(self, literal: str) -> Reading[None]:
        """Read `literal` if the text continues with it, or what a cut text has of it."""
        if not (yield from self.accept(literal)) and self._is_ended:
            unread = self._text[self._position :]
            self._take(len(self._text) if literal.startswith(unread) else self._position)

    def skip_space(self) -> Reading[None]:
        yield from self.run(_SPACE, ignore)

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Reading[None]:
        """Read characters as long as `pattern` matches, which must match any run of the characters of a set."""
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None
            emit(self._take(match.end()))
            if self._position < len(self._text) or self._is_ended:
                return
            yield

    def through(self, markers: Sequence[str], emit: Emit) -> Reading[str | None]:
        """Emit the text before the first of `markers` and read the marker; at the end of the text, None."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            if match := pattern.search(self._text, self._position):
                emit(self._take(match.start()))
                self._take(match.end())
                return match[0]
            held = 0 if self._is_ended else _held_length(self._text[self._position :], markers)
            emit(self._take(len(self._text) - held))
            if self._is_ended:
                return None
            yield

    def rest(self, emit: Emit) -> Reading[None]:
        """Emit all text that follows."""
        while True:
            emit(self._take(len(self._text)))
            if self._is_ended:
                return
            yield

    def _take(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if self._marked is not None:
            self._marked.append(text)
        return text


def _held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the start of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def ignore(_: str) -> None:
    """An `Emit` that drops the text."""
