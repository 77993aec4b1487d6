"""The items of a response's output, and the events in which a stream builds them up."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cluster.api.model_output.events import CallArguments, CallStart, Content, Event, Reasoning

Json = dict[str, Any]


class ItemKind(NamedTuple):
    """How items of one type look and grow."""

    id_prefix: str
    delta_event: str
    done_event: str
    field: str  # of the done event: the whole text
    part: str | None  # type of the item's only content part; None: the text is a field of the item


MESSAGE = ItemKind("msg", "response.output_text.delta", "response.output_text.done", "text", "output_text")
REASONING = ItemKind("rs", "response.reasoning_text.delta", "response.reasoning_text.done", "text", "reasoning_text")
CALL = ItemKind(
    "fc", "response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments", None
)


class OutputItems:
    """Items as they are generated. `items` holds the complete ones."""

    def __init__(self, response_id: str, with_logprobs: bool) -> None:
        self.items: list[Json] = []
        self._suffix = response_id.partition("_")[2]
        self._with_logprobs = with_logprobs
        self._kind: ItemKind | None = None  # of the unfinished item; None between items
        self._call: CallStart | None = None  # of an unfinished function call
        self._texts: list[str] = []  # of the item that grows
        self._logprobs: list[Json] = []  # of the message that grows
        self._unsent: list[Json] = []  # log probabilities of tokens whose text is not part of a message yet

    def feed(self, events: Iterable[Event], logprobs: list[Json]) -> Iterator[Json]:
        """The stream's events for new output."""
        self._unsent += logprobs
        for event in events:
            kind = _kind_of(event)
            if kind is not self._kind or isinstance(event, CallStart):
                yield from self.end("completed")
                yield from self._start(kind, event if isinstance(event, CallStart) else None)
            if not isinstance(event, CallStart):
                yield self._grow(kind, event.text)

    def end(self, status: str) -> Iterator[Json]:
        """Complete the unfinished item. At the end of the output, a response without items gets an empty message."""
        if self._kind is None:
            return
        kind, text = self._kind, "".join(self._texts)
        if kind is MESSAGE:
            self._logprobs += self._take_logprobs()
        item, part = self._item(status, text), self._part(kind, text)
        logprobs = {"logprobs": self._logprobs} if kind is MESSAGE else {}
        yield self._event(kind.done_event, part is not None, {kind.field: text, **logprobs})
        if part is not None:
            yield self._event("response.content_part.done", True, {"part": part})
        yield self._item_event("response.output_item.done", item)
        self.items.append(item)
        self._kind = None

    def finish(self, status: str) -> Iterator[Json]:
        """The events after the last output."""
        if self._kind is None and not self.items:
            yield from self._start(MESSAGE, None)
        yield from self.end(status)

    def _start(self, kind: ItemKind, call: CallStart | None) -> Iterator[Json]:
        self._kind, self._call, self._texts, self._logprobs = kind, call, [], []
        yield self._item_event("response.output_item.added", self._item("in_progress", None))
        if (part := self._part(kind, "")) is not None:
            yield self._event("response.content_part.added", True, {"part": part})

    def _grow(self, kind: ItemKind, text: str) -> Json:
        self._texts.append(text)
        if kind is not MESSAGE:
            return self._event(kind.delta_event, kind.part is not None, {"delta": text})
        logprobs = self._take_logprobs()
        self._logprobs += logprobs
        return self._event(kind.delta_event, True, {"delta": text, "logprobs": logprobs})

    def _take_logprobs(self) -> list[Json]:
        logprobs, self._unsent = self._unsent, []
        return logprobs

    def _item(self, status: str, text: str | None) -> Json:
        """The unfinished item; without content if `text` is None."""
        assert self._kind is not None
        fields: Json = {"id": self._item_id, "status": status}
        if self._call is not None:
            call = {"call_id": self._call.call_id, "name": self._call.name, "arguments": text or ""}
            return fields | {"type": "function_call", **call}
        content = [] if text is None else [self._part(self._kind, text)]
        if self._kind is REASONING:
            return fields | {"type": "reasoning", "summary": [], "content": content}
        return fields | {"type": "message", "role": "assistant", "content": content}

    def _part(self, kind: ItemKind, text: str) -> Json | None:
        if kind.part is None:
            return None
        part: Json = {"type": kind.part, "text": text}
        if kind is MESSAGE:
            part |= {"annotations": [], "logprobs": list(self._logprobs) if self._with_logprobs else []}
        return part

    @property
    def _item_id(self) -> str:
        assert self._kind is not None
        return f"{self._kind.id_prefix}_{self._suffix}_{len(self.items)}"

    def _item_event(self, kind: str, item: Json) -> Json:
        return {"type": kind, "output_index": len(self.items), "item": item}

    def _event(self, kind: str, has_part: bool, fields: Json) -> Json:
        place = {"content_index": 0} if has_part else {}
        return {"type": kind, "item_id": self._item_id, "output_index": len(self.items), **place, **fields}


def _kind_of(event: Event) -> ItemKind:
    if isinstance(event, Content):
        return MESSAGE
    if isinstance(event, Reasoning):
        return REASONING
    assert isinstance(event, CallStart | CallArguments)
    return CALL
