"""The grammar of calls that a request demands accepts calls in the model's format, and nothing else."""

import json
from functools import cache
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from specray.server.chat.output import call_grammar
from specray.server.chat.protocol import ChatRequest
from specray.server.config import ReasoningParserName, ToolCallParserName
from specray.server.model_output.events import collect
from specray.server.model_output.parser import MessageParser
from specray.server.model_output.reasoning import REASONING_FORMATS
from specray.server.tool_calls.formats import TOOL_FORMATS
from specray.structured_output.compiler import GrammarCompiler
from tests.support.json_toy import BYTES_END, byte_tokenizer
from tests.unit.server.test_chat_tools import TOOLS, USER

PARIS = '{"city": "Paris"}'


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), BYTES_END + 1, [BYTES_END])


def accepts(
    text: str,
    parser: ToolCallParserName,
    reasoning: ReasoningParserName | None = None,
    prompt: str = "",
    **options: Any,
) -> bool:
    """Whether a request's output may be `text`, as a whole."""
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": "required"} | options)
    grammar = call_grammar(body, TOOL_FORMATS[parser])
    assert grammar is not None
    return matches(text, grammar, reasoning, prompt)


def matches(
    text: str,
    grammar: GrammarSpec,
    reasoning: ReasoningParserName | None,
    prompt: str,
    template: str = "{{ content.split('</think>')[-1] }}",
) -> bool:
    """Whether an output that a prompt with this end has may be `text`, as a whole."""
    if reasoning is not None:
        grammar = REASONING_FORMATS[reasoning].before_grammar().with_reasoning(grammar, prompt, template)
    matcher = compiler().compile(grammar).matcher()
    return all(map(matcher.accept, [*byte_tokenizer().encode(text), BYTES_END]))


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
        ("deepseek-r1", "<think>\n", f"Hmm.</think>\n\n{CALL}", True),
        ("deepseek-r1", "<think>\n", CALL, False),
        ("deepseek-r1", "", f"Hmm.</think>\n\n{CALL}", False),
        ("deepseek-r1", "", f"<think>Hmm.</think>\n\n{CALL}", True),
        ("deepseek-r1", "", CALL, True),
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


GRAMMARS = [
    (make_grammar("json_schema", {"type": "object", "properties": {}}), "{}"),
    (make_grammar("json_object"), '{"a": [1]}'),
    (make_grammar("choice", ["yes", "no"]), "no"),
    (make_grammar("regex", "[ab]+"), "abba"),
    (make_grammar("ebnf", 'root ::= "x" | "y" root'), "yx"),
]


@pytest.mark.parametrize(("grammar", "answer"), GRAMMARS, ids=[grammar.kind for grammar, _ in GRAMMARS])
@pytest.mark.parametrize("reasoning", ["deepseek-r1", "qwen3"])
def test_every_grammar_holds_for_the_answer_after_free_reasoning(
    reasoning: ReasoningParserName, grammar: GrammarSpec, answer: str
) -> None:
    """What the parser then calls content matches the grammar."""
    for prompt, thoughts in [
        ("<think>\n", "So {\n</think>\n\n"),
        ("", "<think>So {</think>"),
        ("", ""),
        ("</think>\n", ""),
    ]:
        text = thoughts + answer
        assert matches(text, grammar, reasoning, prompt)
        assert not matches(thoughts + "Sure!", grammar, reasoning, prompt)
        parser = MessageParser(REASONING_FORMATS[reasoning].before_grammar().parser(prompt))
        message = collect(parser.parse(text))
        assert (message.content, message.reasoning) == (answer, "So {" if thoughts else "")
    assert not matches(answer, grammar, reasoning, "<think>\n")


def test_a_grammar_that_has_the_marks_describes_the_reasoning_too() -> None:
    grammar = make_grammar("regex", "<think>[ab]*</think>c")
    assert matches("<think>ab</think>c", grammar, "deepseek-r1", "")
    assert not matches("<think>x</think><think>ab</think>c", grammar, "deepseek-r1", "")


@pytest.mark.parametrize("reasoning", ["deepseek-r1", "qwen3"])
def test_a_model_whose_template_knows_no_reasoning_begins_with_the_answer(reasoning: ReasoningParserName) -> None:
    """It would write the mark by chance, and never the one that ends it."""
    grammar = make_grammar("choice", ["yes", "no"])
    assert matches("yes", grammar, reasoning, "assistant\n", "{{ content }}")
    assert not matches("<think></think>yes", grammar, reasoning, "assistant\n", "{{ content }}")
    assert matches("So.</think>yes", grammar, reasoning, "assistant\n<think>\n", "{{ content }}")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_model_that_may_answer_has_no_grammar(choice: str | None) -> None:
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": choice})
    assert call_grammar(body, TOOL_FORMATS["hermes"]) is None


def test_a_schema_is_part_of_the_grammar_as_it_was_sent() -> None:
    body = ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": "required"})
    grammar = call_grammar(body, TOOL_FORMATS["mistral"])
    assert grammar is not None
    assert json.dumps(TOOLS[0]["function"]["parameters"]) in grammar.text
