"""The input of the chat template for a request: messages, tools and variables.

Templates of models that were not trained with tools do not show them. For these, a system message describes the tools,
and calls and their results become the text of ordinary messages.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from specray.errors import InvalidRequestError
from specray.server.chat import harmony
from specray.server.chat.protocol import ChatRequest
from specray.server.config import ToolCallParserName
from specray.server.tool_calls.formats import HARMONY, TOOL_FORMATS, ToolFormat, detected_format

DEFAULT_FORMAT: ToolCallParserName = "hermes"  # of models whose template does not show tools

Json = dict[str, Any]


class ChatPrompt(NamedTuple):
    """The arguments of `render_chat`."""

    messages: list[Json]
    add_generation_prompt: bool
    tools: list[Json]
    variables: Json
    continue_final_message: bool


def tool_format(parser: ToolCallParserName | None, template: str) -> ToolFormat | None:
    """The format of a model's tool calls; None if its template has one of its own that is not in the table."""
    name = parser or detected_format(template) or (None if _shows_tools(template) else DEFAULT_FORMAT)
    return TOOL_FORMATS[name] if name else None


def chat_prompt(body: ChatRequest, calls: ToolFormat | None, template: str) -> ChatPrompt:
    """What `template` renders for `body`. InvalidRequestError if it has tools and their format is unknown."""
    messages = [message.for_template for message in body.messages]
    tools = [tool.for_template for tool in body.offered_tools]
    if calls is None:
        if tools:
            raise InvalidRequestError(
                "the format in which this model calls tools is not recognized; start the server with "
                "--tool-call-parser, or leave tools out",
                "tools",
            )
        return _prompt(body, messages, [])
    if calls is HARMONY:
        messages = list(harmony.as_turns(with_one_system_message(messages)))
        return _prompt(body, messages, tools, harmony.template_variables(body.template_variables))
    if calls.has_text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    if "tool_calls" not in template:
        messages = list(_without_calls(messages, calls))
    if tools and not _shows_tools(template):
        messages, tools = _with_instructions(messages, tools, calls), []
    return _prompt(body, messages, tools)


def with_one_system_message(messages: Sequence[Json]) -> list[Json]:
    """`messages` with the texts of all system messages joined into one message, which comes first."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _prompt(body: ChatRequest, messages: list[Json], tools: list[Json], variables: Json | None = None) -> ChatPrompt:
    """`variables` of the template, where they are not the request's own."""
    opens_answer = body.add_generation_prompt is not False
    chosen = body.template_variables if variables is None else variables
    return ChatPrompt(messages, opens_answer, tools, chosen, body.continue_final_message is True)


def _shows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _with_text_arguments(message: Json) -> Json:
    if "tool_calls" not in message:
        return message
    return message | {
        "tool_calls": [
            call | {"function": call["function"] | {"arguments": _text(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    }


def _without_calls(messages: Sequence[Json], calls: ToolFormat) -> Iterator[Json]:
    """`messages` with roles user and assistant only. Neighbouring tool results become one message."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        yield _with_written_calls(message, calls)
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _with_written_calls(message: Json, calls: ToolFormat) -> Json:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    written = calls.syntax.write((function["name"], _text(function["arguments"])) for function in functions)
    return {"role": "assistant", "content": "\n".join(filter(None, (message["content"], written)))}


def _with_instructions(messages: list[Json], tools: list[Json], calls: ToolFormat) -> list[Json]:
    """`messages` with a system message that describes the tools, after the request's own if there is one."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = calls.syntax.write([("function-name", '{"argument-name": "value"}')])
    instructions = (
        "You can call functions to answer the user. These are the functions, as JSON with the schema of their "
        f"arguments:\n<tools>\n{listed}\n</tools>\nTo call a function, write exactly this, with its name and "
        f"arguments:\n{example}"
    )
    if messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
