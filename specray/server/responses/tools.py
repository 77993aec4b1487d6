"""Tools of a response request, and the functions that they are for the model.

Functions stay functions. A custom tool, whose input is any text, becomes a function of one string. The tools of a
namespace become functions with its name in front of theirs. Tools that OpenAI runs are not shown to the model.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from specray.errors import InvalidRequestError
from specray.server.chat.tools import MAX_TOOLS, ChoiceName, FunctionName
from specray.server.schemas.parts import BodyPart, ByType, HostedTool

Json = dict[str, Any]

INPUT = "input"  # parameter of a function that stands for a custom tool
_SEPARATOR = "__"  # between a namespace and a name
_HOSTED = (
    *("web_search", "file_search", "computer", "mcp", "code_interpreter", "programmatic_tool_calling"),
    *("image_generation", "local_shell", "shell", "tool_search", "apply_patch"),
)


class FunctionTool(BodyPart):
    """A function of the client's."""

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def for_chat(self, name: str) -> Json:
        shown = self.model_dump(include={"description", "parameters", "strict"})
        return {"type": "function", "function": {"name": name} | shown}


class InputFormat(BodyPart):
    """The form of a custom tool's input. The model is shown a grammar, which is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(max_length=65_536)] | None = None


class CustomTool(BodyPart):
    """A tool of the client's whose input is a text."""

    type: Literal["custom"]
    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    format: InputFormat | None = None

    @property
    def has_grammar(self) -> bool:
        return self.format is not None and self.format.type == "grammar"

    def for_chat(self, name: str) -> Json:
        lines = [self.description]
        if self.format is not None and self.format.type == "grammar":
            lines.append(f"The input matches this {self.format.syntax} grammar:\n{self.format.definition}")
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        shown = {"description": "\n".join(filter(None, lines)), "parameters": parameters}
        return {"type": "function", "function": {"name": name} | shown}


ClientTool = FunctionTool | CustomTool


class Namespace(BodyPart):
    """Tools of the client's with a common name in front of theirs."""

    type: Literal["namespace"]
    name: FunctionName
    tools: Annotated[
        list[Annotated[ClientTool, ByType("expected a tool of type function or custom in a namespace")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


ResponseTool = Annotated[
    ClientTool | Namespace | HostedTool,
    ByType("expected a tool of type function, custom or namespace, or one that OpenAI runs", hosted=_HOSTED),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedToolChoice(BodyPart):
    type: Literal["function", "custom"]
    name: FunctionName


class AllowedFunctions(BodyPart):
    """A `tool_choice` that lets the model see all functions and call some. Hosted tools may be among these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice | HostedTool], Field(min_length=1, max_length=MAX_TOOLS)]


FunctionChoice = Annotated[
    ChoiceName | NamedToolChoice | AllowedFunctions,
    ByType(
        "expected 'none', 'auto', 'required' or an object of type function, custom or allowed_tools; tools that OpenAI "
        "runs cannot be chosen"
    ),
]


class ToolName(NamedTuple):
    """How the client names a tool that it runs."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def for_chat(self) -> str:
        return chat_name(self.name, self.namespace)


def chat_name(name: str, namespace: str | None) -> str:
    """The name of the function that the model sees."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


class ToolSet:
    """The tools of one request. InvalidRequestError if OpenAI runs all of them."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self._tools = list(_named(tools))
        self.hosted = [tool.type for tool in tools if isinstance(tool, HostedTool)]
        if self.hosted and not self._tools:
            raise InvalidRequestError(
                f"tools has only tools that OpenAI runs ({self.hosted[0]}), which this server cannot run; send "
                "functions, or leave tools out",
                "tools",
            )

    @property
    def by_chat_name(self) -> dict[str, ToolName]:
        return {name.for_chat: name for name, _ in self._tools}

    @property
    def with_grammars(self) -> list[str]:
        """Names of the custom tools whose input has a grammar."""
        return [name.name for name, tool in self._tools if isinstance(tool, CustomTool) and tool.has_grammar]

    def for_chat(self) -> list[Json]:
        return [tool.for_chat(name.for_chat) for name, tool in self._tools]

    def choice_for_chat(self, choice: str | NamedToolChoice | AllowedFunctions | None) -> object:
        """`tool_choice` of the chat request. InvalidRequestError if it demands a call that no grammar can enforce."""
        if isinstance(choice, NamedToolChoice):
            self._check_demanded([choice.name])
            return self._chosen(choice)
        if not isinstance(choice, AllowedFunctions):
            self._check_demanded([name.name for name, _ in self._tools] if choice == "required" else [])
            return choice
        own = [tool for tool in choice.tools if isinstance(tool, NamedToolChoice)]
        if not own:
            raise InvalidRequestError("tool_choice allows only tools that OpenAI runs; allow a function", "tool_choice")
        self._check_demanded([tool.name for tool in own] if choice.mode == "required" else [])
        allowed = {"mode": choice.mode, "tools": [self._chosen(tool) for tool in own]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def _check_demanded(self, names: Sequence[str]) -> None:
        if unenforced := [name for name in names if name in self.with_grammars]:
            raise InvalidRequestError(
                f"tool_choice demands a call, and the grammar of the custom tool {unenforced[0]!r} cannot be enforced; "
                "set tool_choice='auto', or send a function",
                "tool_choice",
            )

    def _chosen(self, choice: NamedToolChoice) -> Json:
        known = next((name.for_chat for name, _ in self._tools if name.name == choice.name), choice.name)
        return {"type": "function", "function": {"name": known}}


def _named(tools: Sequence[ResponseTool]) -> Iterator[tuple[ToolName, ClientTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for inner in tool.tools:
                yield ToolName(inner.name, tool.name, isinstance(inner, CustomTool)), inner
        elif not isinstance(tool, HostedTool):
            yield ToolName(tool.name, None, isinstance(tool, CustomTool)), tool
