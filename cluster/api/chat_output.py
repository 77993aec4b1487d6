"""How the text that a chat request generates is read, and the grammar of calls that the request demands."""

from collections.abc import Collection
from typing import Any, NamedTuple

from cluster.api.messages import ChosenTool, demands_call
from cluster.api.model_output.parser import MessageParser
from cluster.api.model_output.reasoning import ReasoningFormat
from cluster.api.protocol import ChatRequest
from cluster.api.tool_calls.formats import ToolFormat
from cluster.api.tool_calls.syntax import Function
from specray.grammar import GrammarSpec, make_grammar

Json = dict[str, Any]


class ChatOutput(NamedTuple):
    """The formats of one request's output; a format is None where its parts stay content."""

    calls: ToolFormat | None = None
    names: Collection[str] = ()  # of the functions that may be called
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    prompt_end: str = ""  # text of the prompt's last tokens
    is_call_named: bool = False  # by the request, in which case a call does not end the output

    def parser(self) -> MessageParser:
        """A parser of one choice."""
        return MessageParser(
            self.reasoning.parser(self.prompt_end) if self.reasoning else None,
            self.calls.parser(self.names, self.max_calls) if self.calls else None,
        )


def chat_output(
    body: ChatRequest, calls: ToolFormat | None, reasoning: ReasoningFormat | None, prompt_end: str
) -> ChatOutput:
    """The formats that a request uses: calls only of tools that may be called, reasoning unless it opts out."""
    names = frozenset(tool.function.name for tool in body.callable_tools)
    return ChatOutput(
        calls if names else None,
        names,
        1 if body.parallel_tool_calls is False else None,
        reasoning if body.separate_reasoning is not False else None,
        prompt_end,
        isinstance(body.tool_choice, ChosenTool),
    )


def call_grammar(
    body: ChatRequest, calls: ToolFormat | None, reasoning: ReasoningFormat | None, prompt_end: str
) -> GrammarSpec | None:
    """The grammar of a message that must call a tool; None if the request leaves that to the model."""
    if calls is None or not demands_call(body.tool_choice):
        return None
    functions = [Function(tool.function.name, tool.function.parameters or {}) for tool in body.callable_tools]
    max_calls = 1 if isinstance(body.tool_choice, ChosenTool) or body.parallel_tool_calls is False else None
    preface = reasoning.structural_tag(prompt_end) if reasoning else None
    return make_grammar("structural_tag", calls.syntax.structural_tag(functions, max_calls, preface), "tools")
