"""Tools of a chat request and its choice among them, in OpenAI's shape, with their bounds."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specray.errors import InvalidRequestError
from specray.server.schemas.parts import MAX_DEPTH, BodyPart, ByType, depth, is_larger

MAX_TOOLS = 128
MAX_TOOLS_LENGTH = 256 * 1024  # characters of all tools of a request, as JSON
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"

Json = dict[str, Any]
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


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


ChoiceName = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    ChoiceName | ChosenTool | AllowedToolChoice,
    ByType("expected 'none', 'auto', 'required' or an object of type function or allowed_tools"),
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
