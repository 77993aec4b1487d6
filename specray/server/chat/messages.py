"""Messages of a chat request, in OpenAI's shape.

`for_template` is the value that a chat template receives.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specray.errors import InvalidRequestError
from specray.server.chat.tools import MAX_TOOLS, FunctionName
from specray.server.schemas.parts import MAX_DEPTH, BodyPart, JoinedText, depth

Json = dict[str, Any]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


def _written(arguments: object) -> object:
    """Arguments as JSON text; some clients send the object itself, or null."""
    if arguments is None:
        return ""
    if not isinstance(arguments, dict):
        return arguments
    if depth(arguments) > MAX_DEPTH:
        raise InvalidRequestError(f"the arguments of a call are nested more than {MAX_DEPTH} levels; flatten them")
    return json.dumps(arguments, ensure_ascii=False)


class CalledFunction(BodyPart):
    name: FunctionName
    arguments: Annotated[str, Field(max_length=1_000_000), BeforeValidator(_written)]

    @property
    def value(self) -> object:
        """The arguments as templates expect them: an object; text that is not the JSON of one stays text."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) and depth(value) <= MAX_DEPTH else self.arguments


class ToolCall(BodyPart):
    """A call that the assistant made earlier in the conversation."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BodyPart):
    """One message of a conversation. Only an assistant's message and a tool's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: JoinedText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of reasoning_content
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    function_call: None = None
    audio: None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise InvalidRequestError(f"content is required in a message of role {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError(f"a message of role {self.role!r} has tool_calls; only assistants call tools")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequestError("a message of role 'tool' needs the tool_call_id that it answers")
        return self

    @property
    def for_template(self) -> Json:
        """Absent fields are left out, because templates test whether they are defined."""
        message: Json = {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


def _call_for_template(call: ToolCall) -> Json:
    function = {"name": call.function.name, "arguments": call.function.value}
    return {"id": call.id, "type": "function", "function": function}
