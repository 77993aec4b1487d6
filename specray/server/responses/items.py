"""Items of a response request's input, and their translation to messages of a chat."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, TypeAdapter

from specray.server.chat.messages import CallId
from specray.server.chat.tools import FunctionName
from specray.server.responses.tools import INPUT, chat_name
from specray.server.schemas.parts import BY_SHAPE, MAX_PARTS, BodyPart, ByType, Text

Json = dict[str, Any]

MAX_ITEMS = 4096
LongText = Annotated[str, Field(max_length=1_000_000)]


class TextContent(BodyPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalContent(BodyPart):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content = Annotated[
    TextContent | RefusalContent,
    ByType("expected a part of type input_text, output_text, text or refusal; images, files and audio are not read"),
]
Parts = Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True), Tag("[list]")]
TextOrParts = Annotated[Text | Parts, BY_SHAPE]


class ReasoningContent(BodyPart):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(BodyPart):
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOrParts


class ReasoningItem(BodyPart):
    """Reasoning of an earlier answer. Encrypted reasoning of another server is dropped, because it cannot be read."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningContent], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class FunctionCallItem(BodyPart):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: LongText


class CustomCallItem(BodyPart):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = None
    input: LongText

    @property
    def arguments(self) -> str:
        return json.dumps({INPUT: self.input}, ensure_ascii=False)


class ShellCallItem(BodyPart):
    """A command that an earlier model asked the client to run."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: Json
    name: Literal["local_shell"] = "local_shell"
    namespace: None = None

    @property
    def arguments(self) -> str:
        return json.dumps(self.action, ensure_ascii=False)


class OutputItem(BodyPart):
    """The result of a tool that the client ran."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: TextOrParts


class LocalShellOutputItem(BodyPart):
    type: Literal["local_shell_call_output"]
    id: CallId  # the call's
    output: Text

    @property
    def call_id(self) -> str:
        return self.id


class HostedItem(BodyPart):
    """A call of a tool that OpenAI ran in an earlier answer. It is dropped."""

    type: Literal["web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"]


CallItem = FunctionCallItem | CustomCallItem | ShellCallItem
ResultItem = OutputItem | LocalShellOutputItem
AnyItem = MessageItem | ReasoningItem | CallItem | ResultItem | HostedItem
Item = Annotated[
    AnyItem,
    ByType(
        "expected an item of type message, reasoning, function_call, custom_tool_call or local_shell_call, or the "
        "output of one of these calls",
        default="message",  # of an item that has only role and content
    ),
]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("[list]")]
ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[Item])
Input = Annotated[Text | Items, BY_SHAPE]


def chat_messages(
    items: Iterable[AnyItem],
) -> Iterator[Json]:
    """The conversation as OpenAI's messages. Items that one answer consists of become one message of the assistant."""
    answer: Json = {}
    for item in items:
        if isinstance(item, ReasoningItem):
            yield from _finished(answer)
            answer = {"reasoning_content": "\n".join(part.text for part in item.content or []) or None}
        elif isinstance(item, CallItem):
            function = {"name": chat_name(item.name, item.namespace), "arguments": item.arguments}
            calls = [*answer.get("tool_calls", []), {"id": item.call_id, "type": "function", "function": function}]
            answer = answer | {"tool_calls": calls}
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if answer.keys() & {"content", "tool_calls"}:
                yield from _finished(answer)
                answer = {}
            answer = answer | {"content": _text(item.content)}
        elif not isinstance(item, HostedItem):
            yield from _finished(answer)
            answer = {}
            yield _other(item)
    yield from _finished(answer)


def _finished(answer: Json) -> Iterator[Json]:
    if answer.keys() & {"content", "tool_calls"}:  # reasoning alone is not a message
        yield {"role": "assistant", **answer}


def _other(item: MessageItem | ResultItem) -> Json:
    if isinstance(item, ResultItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[TextContent | RefusalContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
