"""Messages and tools of a chat request, in OpenAI's shape, with their bounds.

Each model has `for_template`, the value that a chat template receives.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from specray.errors import InvalidRequestError
from specray.server.errors import UNSUPPORTED_TYPE, short_repr

MAX_TOOLS = 128
MAX_TOOLS_LENGTH = 256 * 1024  # characters of all tools of a request, as JSON
MAX_DEPTH = 32  # of a schema or of a call's arguments
MAX_PARTS = 8192  # of the contents of all messages together
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"

Json = dict[str, Any]
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class BodyPart(BaseModel):
    """An object inside a body: strict JSON types; fields that are not declared are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


def by_type(expected: str, default: str | None = None) -> Discriminator:
    """Chooses a member of a union by the field `type`, whose tag is that type in brackets; see `Tag`.

    Brackets keep tags out of the locations of errors. `expected` says which types there are.
    """

    def tag(value: object) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"[{kind}]"

    return Discriminator(tag, custom_error_type=UNSUPPORTED_TYPE, custom_error_message=expected)


# Chooses between text and a list.
BY_SHAPE = Discriminator(lambda value: "[list]" if isinstance(value, list) else "[text]")
Text = Annotated[str, Tag("[text]")]


class FunctionDefinition(BodyPart):
    """A function that the model may call. `parameters` is a JSON schema; null accepts an empty object."""

    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(BodyPart):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def for_template(self) -> Json:
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


class ChosenFunction(BodyPart):
    name: FunctionName


class ChosenTool(BodyPart):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(BodyPart):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(BodyPart):
    """A `tool_choice` that lets the model see all tools and call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def tag_of_choice(choice: object) -> str:
    """The tag of a `tool_choice`. Brackets keep it out of the locations of errors."""
    if isinstance(choice, str):
        return "[text]"
    return f"[{choice.get('type') if isinstance(choice, dict) else getattr(choice, 'type', None)}]"


ChoiceName = Annotated[Literal["none", "auto", "required"], Tag("[text]")]
ToolChoice = Annotated[
    ChoiceName | Annotated[ChosenTool, Tag("[function]")] | Annotated[AllowedToolChoice, Tag("[allowed_tools]")],
    Discriminator(
        tag_of_choice,
        custom_error_type="unsupported_tool_choice",
        custom_error_message="expected 'none', 'auto', 'required' or an object of type function or allowed_tools",
    ),
]


def named_functions(choice: ToolChoice | None) -> list[str] | None:
    """The functions that `choice` limits calls to; None if it names none."""
    if isinstance(choice, ChosenTool):
        return [choice.function.name]
    if isinstance(choice, AllowedToolChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return None


def demands_call(choice: ToolChoice | None) -> bool:
    """Whether the model must call a function."""
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ChosenTool)


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


class TextPart(BodyPart):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


def _joined(value: object) -> object:
    """Join text parts to one string. Any other part is rejected by its index."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"content part {index} is {short_repr(kind)}; only parts of type 'text' with a string are supported",
                "messages",
            )
        texts.append(part["text"])
    return "".join(texts)


JoinedText = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]


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


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """InvalidRequestError if tools are too large or not distinct, or if `choice` names none of them."""
    names = [tool.function.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequestError(f"two tools are named {twice[0]!r}; give each its own name", "tools")
    for tool in tools:
        if is_larger(tool.function.parameters, MAX_TOOLS_LENGTH):
            raise InvalidRequestError(
                f"parameters of {tool.function.name!r} have more than {MAX_TOOLS_LENGTH} characters; shorten them",
                "tools",
            )
        if depth(tool.function.parameters) > MAX_DEPTH:
            raise InvalidRequestError(
                f"parameters of {tool.function.name!r} are nested more than {MAX_DEPTH} levels; flatten the schema",
                "tools",
            )
    length = sum(len(json.dumps(tool.for_template)) for tool in tools)
    if length > MAX_TOOLS_LENGTH:
        raise InvalidRequestError(
            f"the tools have {length} characters of JSON, more than {MAX_TOOLS_LENGTH}; send fewer or shorter ones",
            "tools",
        )
    if unknown := [name for name in named_functions(choice) or () if name not in names]:
        raise InvalidRequestError(
            f"tool_choice names {unknown[0]!r}, which is not in tools; add it or name another", "tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequestError(
            "tool_choice='required' needs tools; add them or leave tool_choice out", "tool_choice"
        )


def depth(value: object) -> int:
    """Levels of nesting of a JSON value, up to one more than MAX_DEPTH: 0 for a scalar."""
    level, values = 0, [value]
    while containers := [item for item in values if isinstance(item, dict | list)]:
        level += 1
        if level > MAX_DEPTH:
            break
        values = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return level


def is_larger(value: object, limit: int) -> bool:
    """Whether a JSON value has more than `limit` values inside, each of which takes a character at least.

    Looks at no more than about that many, down to MAX_DEPTH levels.
    """
    count, values = 0, [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in values if isinstance(item, dict | list)]
        count += sum(map(len, containers))
        if count > limit:
            return True
        values = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return False


def check_number_of_parts(messages: object, field: str) -> None:
    """InvalidRequestError if the contents of these messages have too many parts, those of tool results included."""
    if not isinstance(messages, list) or len(messages) > MAX_PARTS:
        return  # for the schema to refuse
    contents = [item.get(name) for item in messages if isinstance(item, dict) for name in ("content", "output")]
    parts = [part for content in contents if isinstance(content, list) for part in content[: MAX_PARTS + 1]]
    count = len(parts)
    if count <= MAX_PARTS:
        inner = [part.get("content") for part in parts if isinstance(part, dict)]
        count += sum(len(content) for content in inner if isinstance(content, list))
    if count > MAX_PARTS:
        raise InvalidRequestError(
            f"the contents of {field} have more than {MAX_PARTS} parts; join texts, or send fewer messages", field
        )


def _call_for_template(call: ToolCall) -> Json:
    function = {"name": call.function.name, "arguments": call.function.value}
    return {"id": call.id, "type": "function", "function": function}
