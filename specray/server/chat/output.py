"""How the text that a chat request generates is read, and the grammar of calls that the request demands."""

from collections.abc import Collection
from typing import Any, NamedTuple

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from specray.outputs import Completion, FinishReason
from specray.server.chat.protocol import ChatRequest
from specray.server.chat.tools import ChosenTool, Tool, demands_call
from specray.server.errors import short_repr
from specray.server.model_output.parser import MessageParser
from specray.server.model_output.reasoning import ReasoningFormat
from specray.server.tool_calls.formats import ToolFormat
from specray.server.tool_calls.syntax import Function

Json = dict[str, Any]

_ANNOTATIONS = {"type", "title", "description", "$schema"}  # a schema with no more describes no parameters
_NO_PARAMETERS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


class ChatOutput(NamedTuple):
    """The formats of one request's output; a format is None where its parts stay content."""

    calls: ToolFormat | None = None
    names: Collection[str] = ()  # functions that may be called
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    prompt_end: str = ""  # text of the prompt's last tokens
    is_call_forced: bool = False  # whether a grammar forces a call
    is_call_named: bool = False  # whether the request names it; a call does not end the output then
    separates_reasoning: bool = True  # False: it stays content
    shows_reasoning: bool = True

    def parser(self) -> MessageParser:
        """A parser of one choice."""
        keeps_marks = not self.separates_reasoning
        return MessageParser(
            self.reasoning.parser(self.prompt_end, keeps_marks) if self.reasoning else None,
            self.calls.parser(self.names, self.max_calls, self.is_call_forced) if self.calls else None,
            self.separates_reasoning,
            self.shows_reasoning,
        )


def chat_output(
    body: ChatRequest, calls: ToolFormat | None, reasoning: ReasoningFormat | None, prompt_end: str
) -> ChatOutput:
    """The formats that a request uses; calls only of tools that may be called."""
    names = frozenset(tool.function.name for tool in body.callable_tools)
    return ChatOutput(
        calls if names else None,
        names,
        1 if body.parallel_tool_calls is False else None,
        reasoning,
        prompt_end,
        demands_call(body.tool_choice),
        isinstance(body.tool_choice, ChosenTool),
        body.separate_reasoning is not False,
        body.include_reasoning is not False,
    )


def is_cut(choice: Completion) -> bool:
    """Whether the choice's text ended at a limit or a stop string, not where the model ended it."""
    return choice.finish_reason is not FinishReason.STOP or isinstance(choice.stop_reason, str)


def call_grammar(body: ChatRequest, calls: ToolFormat | None) -> GrammarSpec | None:
    """The grammar of a message that must call a tool; None if the request leaves that to the model."""
    if calls is None or not demands_call(body.tool_choice):
        return None
    functions = [Function(tool.function.name, _arguments_schema(tool)) for tool in body.callable_tools]
    max_calls = 1 if isinstance(body.tool_choice, ChosenTool) or body.parallel_tool_calls is False else None
    return make_grammar("structural_tag", calls.syntax.structural_tag(functions, max_calls), "tools")


def _arguments_schema(tool: Tool) -> Json:
    """The schema of a forced call's arguments: no properties if the function has no parameters.

    InvalidRequestError if they would be no object.
    """
    schema = tool.function.parameters or {}
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequestError(
            f"parameters of {tool.function.name!r} have the type {short_repr(kind)}, but arguments are an object; "
            "declare an object with properties",
            "tools",
        )
    return schema if schema.keys() - _ANNOTATIONS else _NO_PARAMETERS
