"""Parsing of a message as it arrives: reasoning first, then content and tool calls.

A whole message is parsed as one piece, so complete and streamed replies agree.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from specray.server.model_output.events import Content, Event, Reasoning
from specray.server.model_output.reader import Reader, Reading


class Sink(Protocol):
    """Receives what a scanner finds."""

    def take(self) -> list[Event]:
        """The events since the last call."""

    def finish(self) -> None:
        """The text has ended."""


class Parser:
    """Feeds the pieces of a text to a scanner and returns the events that each piece completes."""

    def __init__(self, scan: Callable[[Reader], Reading[None]], sink: Sink) -> None:
        """`scan` starts a scanner that writes to `sink`."""
        self._reader = Reader()
        self._sink = sink
        self._scanning = scan(self._reader)

    def feed(self, text: str) -> list[Event]:
        self._reader.feed(text)
        next(self._scanning, None)
        return self._sink.take()

    def end(self, is_cut: bool = False) -> list[Event]:
        """The events of the text that was held back, at its end; `is_cut` if a limit ended it."""
        self._reader.end(is_cut)
        next(self._scanning, None)
        self._sink.finish()
        return self._sink.take()


class MessageParser(NamedTuple):
    """Parsers of reasoning and of tool calls, one after the other; None where a message can have neither."""

    reasoning: Parser | None = None
    calls: Parser | None = None
    separates_reasoning: bool = True  # False: it is content, in which no calls are looked for
    shows_reasoning: bool = True

    def feed(self, text: str) -> list[Event]:
        if self.reasoning is not None:
            return list(self._with_calls(self.reasoning.feed(text)))
        return list(self._with_calls([Content(text)])) if text else []

    def end(self, is_cut: bool = False) -> list[Event]:
        events = list(self._with_calls(self.reasoning.end())) if self.reasoning is not None else []
        return events + self.calls.end(is_cut) if self.calls is not None else events

    def parse(self, text: str, is_cut: bool = False) -> list[Event]:
        """All events of a whole text."""
        return [*self.feed(text), *self.end(is_cut)]

    def _with_calls(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if self.calls is not None and isinstance(event, Content):
                yield from self.calls.feed(event.text)
            elif isinstance(event, Reasoning):
                if self.shows_reasoning:
                    yield event if self.separates_reasoning else Content(event.text)
            else:
                yield event
