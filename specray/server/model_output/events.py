"""The parts of a message, in the order in which the model writes them. `collect` joins them to a whole message."""

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model writes before its answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. Calls are numbered from 0."""

    number: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Call(NamedTuple):
    """A complete tool call; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


class ParsedMessage(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]


def collect(events: Iterable[Event]) -> ParsedMessage:
    """The whole message."""
    listed = list(events)
    starts = [event for event in listed if isinstance(event, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for event in listed:
        if isinstance(event, CallArguments):
            arguments[event.number].append(event.text)
    return ParsedMessage(
        "".join(event.text for event in listed if isinstance(event, Content)),
        "".join(event.text for event in listed if isinstance(event, Reasoning)),
        [Call(start.call_id, start.name, "".join(parts)) for start, parts in zip(starts, arguments, strict=True)],
    )


class EventBuffer:
    """Events since the last `take`. Texts of one kind that follow each other become one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._make: Callable[[str], Event] = Content

    def text(self, make: Callable[[str], Event], text: str) -> None:
        """Add `make(text)`."""
        if make is not self._make:
            self._join()
            self._make = make
        self._texts.append(text)

    def start(self, event: CallStart) -> None:
        self._join()
        self._events.append(event)

    def take(self) -> list[Event]:
        self._join()
        events, self._events = self._events, []
        return events

    def _join(self) -> None:
        if text := "".join(self._texts):
            self._events.append(self._make(text))
        self._texts = []


class Trimmer:
    """Removes whitespace around a text that arrives in pieces: holds it back until other characters follow."""

    def __init__(self, keeps_leading: bool = False) -> None:
        self._is_leading = not keeps_leading  # all text so far was whitespace, and is dropped
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that can be shown once `text` has arrived."""
        if self._is_leading:
            text = text.lstrip()
            self._is_leading = not text
        shown = text.rstrip()
        if not shown:
            self._held.append(text)
            return ""
        shown = "".join(self._held) + shown
        self._held = [text[len(text.rstrip()) :]]
        return shown

    def held(self) -> str:
        """Whitespace at the end of the text."""
        return "".join(self._held)
