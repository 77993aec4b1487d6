"""The items of a response's output, and the events in which a stream builds them up."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from specray.server.model_output.events import CallArguments, CallStart, Content, Event, Reasoning
from specray.server.responses.tools import INPUT, ToolName

Json = dict[str, Any]


class ItemKind(NamedTuple):
    """How items of one type look and grow."""

    id_prefix: str
    delta_event: str
    done_event: str
    field: str  # the done event's field for the whole text
    part: str | None  # type of the item's only content part; None: the text is a field of the item


MESSAGE = ItemKind("msg", "response.output_text.delta", "response.output_text.done", "text", "output_text")
REASONING = ItemKind("rs", "response.reasoning_text.delta", "response.reasoning_text.done", "text", "reasoning_text")
CALL = ItemKind(
    "fc", "response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments", None
)
# Its text is part of the function's arguments, so it is sent when these are complete.
CUSTOM_CALL = ItemKind(
    "ctc", "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "input", None
)


class OutputItems:
    """Items as they are generated. `items` holds the complete ones; `tools` has the client's names of functions."""

    def __init__(self, response_id: str, with_logprobs: bool, tools: Mapping[str, ToolName]) -> None:
        self.items: list[Json] = []
        self._suffix = response_id.partition("_")[2]
        self._with_logprobs = with_logprobs
        self._tools = tools
        self._kind: ItemKind | None = None  # of the unfinished item; None between items
        self._call: CallStart | None = None  # of an unfinished function call
        self._texts: list[str] = []  # of the item that grows
        self._logprobs: list[Json] = []  # of the message that grows
        self._unsent: list[Json] = []  # log probabilities of tokens whose text is not part of a message yet

    def feed(self, events: Iterable[Event], logprobs: list[Json]) -> Iterator[Json]:
        """The stream's events for new output."""
        self._unsent += logprobs
        for event in events:
            kind = self._kind_of(event)
            if kind is not self._kind or isinstance(event, CallStart):
                yield from self.end("completed")
                yield from self._start(kind, event if isinstance(event, CallStart) else None)
            if not isinstance(event, CallStart):
                yield from self._grow(kind, event.text)

    def end(self, status: str) -> Iterator[Json]:
        """Complete the unfinished item. At the end of the output, a response without items gets an empty message."""
        if self._kind is None:
            return
        kind, text = self._kind, "".join(self._texts)
        if kind is MESSAGE:
            self._logprobs += self._take_logprobs()
        if kind is CUSTOM_CALL:
            text = _input_of(text)
            yield self._event(kind.delta_event, False, {"delta": text})
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

    def _grow(self, kind: ItemKind, text: str) -> Iterator[Json]:
        self._texts.append(text)
        if kind is MESSAGE:
            logprobs = self._take_logprobs()
            self._logprobs += logprobs
            yield self._event(kind.delta_event, True, {"delta": text, "logprobs": logprobs})
        elif kind is not CUSTOM_CALL:
            yield self._event(kind.delta_event, kind.part is not None, {"delta": text})

    def _take_logprobs(self) -> list[Json]:
        logprobs, self._unsent = self._unsent, []
        return logprobs

    def _item(self, status: str, text: str | None) -> Json:
        """The unfinished item; without content if `text` is None."""
        assert self._kind is not None
        fields: Json = {"id": self._item_id, "status": status}
        if self._call is not None:
            name = self._tool_of(self._call)
            call: Json = {"call_id": self._call.call_id, "name": name.name, self._kind.field: text or ""}
            if name.namespace is not None:
                call["namespace"] = name.namespace
            return fields | {"type": "custom_tool_call" if name.is_custom else "function_call", **call}
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

    def _kind_of(self, event: Event) -> ItemKind:
        if isinstance(event, Content):
            return MESSAGE
        if isinstance(event, Reasoning):
            return REASONING
        if isinstance(event, CallArguments):
            assert self._kind is not None
            return self._kind
        return CUSTOM_CALL if self._tool_of(event).is_custom else CALL

    def _tool_of(self, call: CallStart) -> ToolName:
        return self._tools.get(call.name, ToolName(call.name))


def _input_of(arguments: str) -> str:
    """The input of a custom tool in a function's arguments; all of them if they are no object that has it."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
