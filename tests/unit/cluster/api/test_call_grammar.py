"""The grammar of calls that a request demands accepts calls in the model's format, and nothing else."""

import json
from functools import cache
from typing import Any

import pytest
import xgrammar

from cluster.api.chat_output import call_grammar
from cluster.api.model_output.events import collect
from cluster.api.model_output.parser import MessageParser
from cluster.api.model_output.reasoning import REASONING_FORMATS
from cluster.api.protocol import ChatRequest
from cluster.api.tool_calls.formats import TOOL_FORMATS
from cluster.config import ReasoningParserName, ToolCallParserName
from specray.errors import InvalidRequestError
from tests.unit.cluster.api.test_chat_tools import TOOLS, USER

PARIS = '{"city": "Paris"}'


@cache
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([value]) for value in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info)


def accepts(
    text: str,
    parser: ToolCallParserName,
    reasoning: ReasoningParserName | None = None,
    prompt: str = "",
    **options: Any,
) -> bool:
    """Whether a request's output may be `text`, as a whole."""
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": "required"} | options)
    grammar = call_grammar(body, TOOL_FORMATS[parser], REASONING_FORMATS[reasoning] if reasoning else None, prompt)
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(grammar.text))
    return matcher.accept_string(text) and matcher.accept_token(256)


def written(parser: ToolCallParserName, *calls: tuple[str, str]) -> str:
    return TOOL_FORMATS[parser].syntax.write(calls)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_required_calls_are_in_the_models_format(parser: ToolCallParserName) -> None:
    both = written(parser, ("get_weather", PARIS), ("f", "{}"))
    assert accepts(both, parser)
    message = collect(MessageParser(calls=TOOL_FORMATS[parser].parser(("get_weather", "f"), None)).parse(both))
    assert [call.name for call in message.calls] == ["get_weather", "f"]
    for wrong in ("", "Sure.", both + "!", written(parser, ("rm", "{}")), written(parser, ("get_weather", "{}"))):
        assert not accepts(wrong, parser)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@pytest.mark.parametrize(
    ("parameters", "has_none"),
    [
        (None, True),
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}, "required": []}, True),
        ({"title": "now", "description": "The time."}, True),
        ({"type": "object", "additionalProperties": True}, False),
    ],
)
def test_a_function_without_parameters_is_called_without_arguments(
    parameters: Any, has_none: bool, parser: ToolCallParserName
) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    assert accepts(written(parser, ("now", "{}")), parser, tools=tools)
    assert accepts(written(parser, ("now", '{"x": 1}')), parser, tools=tools) is not has_none


@pytest.mark.parametrize("kind", ["string", "array", ["object", "null"], None])
def test_parameters_that_are_no_object_cannot_be_forced(kind: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind, "items": {}}}}]
    with pytest.raises(InvalidRequestError, match="arguments are an object"):
        accepts("", "hermes", tools=tools)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_a_named_function_is_called_once(parser: ToolCallParserName) -> None:
    options = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert accepts(written(parser, ("f", "{}")), parser, **options)
    assert not accepts(written(parser, ("get_weather", PARIS)), parser, **options)
    assert not accepts(written(parser, ("f", "{}"), ("f", "{}")), parser, **options)


def test_calls_one_after_the_other_may_be_forbidden() -> None:
    both = written("hermes", ("f", "{}"), ("f", "{}"))
    assert accepts(both, "hermes")
    assert not accepts(both, "hermes", parallel_tool_calls=False)


CALL = written("hermes", ("f", "{}"))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "is_accepted"),
    [
        ("deepseek-r1", "", f"Hmm.</think>\n\n{CALL}", True),
        ("deepseek-r1", "", CALL, False),
        ("deepseek-r1", "</think>", CALL, True),
        ("qwen3", "", f"<think>\nHmm.\n</think>\n\n{CALL}", True),
        ("qwen3", "", CALL, True),
        ("qwen3", "<think>\n", f"Hmm.</think>{CALL}", True),
        ("qwen3", "<think>\n\n</think>\n\n", CALL, True),
        ("qwen3", "<think>\n\n</think>\n\n", f"<think></think>{CALL}", False),
        (None, "", f"<think></think>{CALL}", False),
    ],
)
def test_a_call_may_follow_reasoning(
    reasoning: ReasoningParserName | None, prompt: str, text: str, is_accepted: bool
) -> None:
    assert accepts(text, "hermes", reasoning, prompt) is is_accepted


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_model_that_may_answer_has_no_grammar(choice: str | None) -> None:
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": choice})
    assert call_grammar(body, TOOL_FORMATS["hermes"], None, "") is None


def test_a_schema_is_part_of_the_grammar_as_it_was_sent() -> None:
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": "required"})
    grammar = call_grammar(body, TOOL_FORMATS["mistral"], None, "")
    assert grammar is not None
    assert json.dumps(TOOLS[0]["function"]["parameters"]) in grammar.text
