"""Items of a response request's input, and their translation to messages of a chat."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from cluster.api.messages import BY_SHAPE, MAX_PARTS, CallId, FunctionName, Part, Text, by_type

Json = dict[str, Any]

MAX_ITEMS = 4096
_DEFAULT_TYPE = "message"  # of an item that has only role and content


class TextContent(Part):
    """One part of a message's content. Only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = Annotated[list[TextContent], Field(max_length=MAX_PARTS, fail_fast=True), Tag("[list]")]
TextOrParts = Annotated[Text | Parts, BY_SHAPE]


class ReasoningContent(Part):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Part):
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOrParts


class ReasoningItem(Part):
    """Reasoning of an earlier answer. Encrypted reasoning of another server is dropped, because it cannot be read."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningContent], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class FunctionCallItem(Part):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: Annotated[str, Field(max_length=1_000_000)]


class FunctionOutputItem(Part):
    type: Literal["function_call_output"]
    call_id: CallId
    output: TextOrParts


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionOutputItem, Tag("[function_call_output]")],
    by_type("expected an item of type message, reasoning, function_call or function_call_output", _DEFAULT_TYPE),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("[list]")]
Input = Annotated[Text | Items, BY_SHAPE]


def chat_messages(
    items: Iterable[MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem],
) -> Iterator[Json]:
    """The conversation as OpenAI's messages. Items that one answer consists of become one message of the assistant."""
    answer: Json = {}
    for item in items:
        if isinstance(item, ReasoningItem):
            yield from _finished(answer)
            answer = {"reasoning_content": "\n".join(part.text for part in item.content or []) or None}
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            calls = [*answer.get("tool_calls", []), {"id": item.call_id, "type": "function", "function": function}]
            answer = answer | {"tool_calls": calls}
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if answer.keys() & {"content", "tool_calls"}:
                yield from _finished(answer)
                answer = {}
            answer = answer | {"content": _text(item.content)}
        else:
            yield from _finished(answer)
            answer = {}
            yield _other(item)
    yield from _finished(answer)


def _finished(answer: Json) -> Iterator[Json]:
    if answer.keys() & {"content", "tool_calls"}:  # reasoning alone is not a message
        yield {"role": "assistant", **answer}


def _other(item: MessageItem | FunctionOutputItem) -> Json:
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
