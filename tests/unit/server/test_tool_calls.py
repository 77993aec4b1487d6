"""Scanners of tool calls: what each format's texts mean, whatever pieces they arrive in."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import AppConfig
from specray.server.config import ReasoningParserName, ToolCallParserName
from specray.server.model_output.events import CallArguments, CallStart, collect
from specray.server.model_output.parser import MessageParser
from specray.server.model_output.reasoning import REASONING_FORMATS
from specray.server.tool_calls.formats import TOOL_FORMATS, detected_format
from tests.support.python_calls import num_python_calls

NAMES = ("f", "get_weather")
BAR = "\uff5c"
DEEPSEEK = {name: f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}


def deepseek(text: str) -> str:
    """`text` with the markers' names in brackets replaced by the markers."""
    for name, marker in DEEPSEEK.items():
        text = text.replace(f"[{name}]", marker)
    return text


Calls = list[tuple[str, Any]]
WEATHER: Calls = [("get_weather", {"city": "Paris"})]
BOTH: Calls = [*WEATHER, ("f", {})]

# format, text, content, calls
CASES: list[tuple[ToolCallParserName, str, str, Calls]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "Sure.",
        WEATHER,
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n',
        "",
        BOTH,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", WEATHER),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", WEATHER),
    ("hermes", '<tool_call>{"name": "f"}', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}<tool_call>{"name": "f", "id": [1]}', "", [("f", {})] * 2),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\""}}',
        "",
        [("f", {"a": '}</tool_call>"'})],
    ),
    ("hermes", " plain text, < <tool_cal \n", " plain text, < <tool_cal \n", []),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "rm"}</tool_call> <tool_call>{"name": "f"}</tool_call> done',
        '<tool_call>{"name": "rm"}</tool_call>done',
        [("f", {})],
    ),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", WEATHER),
    (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {}}',
        "",
        BOTH,
    ),
    ("llama3", 'Let me see.<|python_tag|>{"type": "function", "name": "f"}', "Let me see.", [("f", {})]),
    ("llama3", '{"answer": 3}', '{"answer": 3}', []),
    ("llama3", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {}}]',
        "",
        BOTH,
    ),
    ("mistral", 'Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}', "Yes.", BOTH),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [("f", {})]),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    ("gemma4", 'So.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', "So.", WEATHER),
    ("gemma4", '<|tool_call>call:get_weather{"city": "Paris"}<tool_call|><|tool_call>call:f{}<tool_call|>', "", BOTH),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>1 "\\, {<|"|>,b:[1,-2.5,true],c:{d:null,e:[<|"|><|"|>]}}<tool_call|>',
        "",
        [("f", {"a": '1 "\\, {', "b": [1, -2.5, True], "c": {"d": None, "e": [""]}})],
    ),
    ("gemma4", "<|tool_call>call:f{}", "", [("f", {})]),
    ("gemma4", "<|tool_call>call:rm{}<tool_call|>", "<|tool_call>call:rm{}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f <|tool", "<|tool_call>call:f <|tool", []),
    (
        "deepseekv3",
        deepseek(
            "Sure.[calls▁begin][call▁begin]function[sep]get_weather\n```json\n"
            '{"city": "Paris"}\n```[call▁end]\n[call▁begin]function[sep]f\n```json\n{}\n```[call▁end][calls▁end]'
        ),
        "Sure.",
        BOTH,
    ),
    (
        "deepseekv31",
        deepseek(
            '[calls▁begin][call▁begin]get_weather[sep]{"city": "Paris"}[call▁end]'
            "[call▁begin]f[sep]{}[call▁end][calls▁end]"
        ),
        "",
        BOTH,
    ),
    ("deepseekv31", deepseek("[call▁begin]f"), deepseek("[call▁begin]f"), []),
    ("pythonic", '[get_weather(city="Paris"), f()]', "", BOTH),
    ("pythonic", "<|python_start|>[get_weather(city='Paris',)]<|python_end|>", "", WEATHER),
    (
        "pythonic",
        "[f(a=[1, -2.5, True, None], b={'k': ('x', \"it's\")}, c='\\u00e9\\n\\x41\\q', d=false)]",
        "",
        [("f", {"a": [1, -2.5, True, None], "b": {"k": ["x", "it's"]}, "c": "é\nA\\q", "d": False})],
    ),
    ("pythonic", "[1](https://example.org)", "[1](https://example.org)", []),
    ("pythonic", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", WEATHER),
]
TEXTS = [(case[0], case[1]) for case in CASES]


def parsed(
    name: ToolCallParserName, pieces: Iterable[str], max_calls: int | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the latter without their random ids."""
    parser = MessageParser(calls=TOOL_FORMATS[name].parser(NAMES, max_calls))
    events = [event for piece in pieces for event in parser.feed(piece)]
    message = collect(events + parser.end())
    assert len({call.call_id for call in message.calls}) == len(message.calls)
    return message.content, [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_becomes_content_and_calls(name: ToolCallParserName, text: str, content: str, calls: Calls) -> None:
    found_content, found = parsed(name, [text])
    assert (found_content, [(called, json.loads(arguments)) for called, arguments in found]) == (content, calls)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_pieces_of_a_text_give_the_same_calls(data: st.DataObject) -> None:
    name, text = data.draw(st.sampled_from(TEXTS))
    end = data.draw(st.integers(0, len(text)))  # max_tokens may cut the text anywhere
    inserted = data.draw(st.text(st.sampled_from('{}[]()"\\,:=<>| \nfé'), max_size=4))
    text = text[:end] + inserted + (text[end:] if data.draw(st.booleans()) else "")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    whole = parsed(name, [text])
    assert parsed(name, pieces) == whole
    assert parsed(name, text) == whole  # one character at a time


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_a_text_without_calls_is_unchanged(name: ToolCallParserName, text: str) -> None:
    """Functions that a request does not have are not called, and what is not a call is not lost."""
    parser = TOOL_FORMATS[name].parser((), None)
    message = collect(MessageParser(calls=parser).parse(text))
    assert not message.calls
    assert message.content.replace(" ", "") == text.replace(" ", "")


def test_arguments_are_streamed_before_the_call_is_complete() -> None:
    parser = MessageParser(calls=TOOL_FORMATS["hermes"].parser(NAMES, None))
    start, arguments = parser.feed('<tool_call>{"name": "f", "arguments": {"a": [1, 2')
    assert (type(start), arguments) == (CallStart, CallArguments(0, '{"a": [1'))  # the 2 may be that of 25
    assert parser.feed(', "x') == [CallArguments(0, ', 2, "x')]


FORMS: dict[ToolCallParserName, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "deepseekv3": deepseek("[calls▁begin][call▁begin]function[sep]f\n```json\n%s\n```[call▁end][calls▁end]"),
    "deepseekv31": deepseek("[calls▁begin][call▁begin]f[sep]%s[call▁end][calls▁end]"),
}
# what the model writes as arguments, and the object that a client gets; None: all of it is content
ARGUMENTS: list[tuple[str, Any]] = [
    ('""', {}),
    ("''", {}),
    ("null", {}),
    ("None", {}),
    ("[]", {}),
    ('"null"', {}),
    ("5", None),
    ("true", None),
    ('"abc"', None),
    ('[{"x": 1}]', None),
    ('{"x": True, "y": None}', {"x": True, "y": None}),
    ("{'x': 1, 'y': 'it\\'s \"q\"'}", {"x": 1, "y": 'it\'s "q"'}),
    ('{"x": 1,}', {"x": 1}),
    ('{"x": 1 "y": [1 2,]}', {"x": 1, "y": [1, 2]}),
    ('{"x": }', {"x": None}),
    ("{x: abc}", {"x": "abc"}),
    ('{"x": NaN, "y": -Infinity, "z": .5, "zip": 007}', {"x": None, "y": None, "z": 0.5, "zip": "007"}),
    ('{"x": "a\nb\tc"}', {"x": "a\nb\tc"}),
    ('{"x": "\\q \\x41 \\ud83d\\ude00 \\ud83d \\u00"}', {"x": "\\q A \U0001f600 \ufffd \\u00"}),
    ('{"x": (1, 2)}', {"x": [1, 2]}),
    ('{"x": [1}', {"x": [1]}),
    ('"{\\"x\\": 1}"', {"x": 1}),
    ("\"{'x': True}\"", {"x": True}),
    ('"{} and more"', None),
    ('{"x": %s}' % ("9" * 5000), {"x": "9" * 5000}),
]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("written", "arguments"), ARGUMENTS)
def test_arguments_that_are_no_json_object_are_corrected_or_content(
    name: ToolCallParserName, written: str, arguments: Any
) -> None:
    text = FORMS[name] % written
    content, calls = parsed(name, text)  # in characters
    assert parsed(name, [text]) == (content, calls)
    if arguments is None:
        assert (content, calls) == (text, [])
    else:
        assert (content, [json.loads(found) for _, found in calls]) == ("", [arguments])


def test_the_first_of_two_arguments_of_one_call_counts() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}, "name": "get_weather"}</tool_call>'
    assert parsed("hermes", [text]) == ("", [("f", '{"a": 1}')])


def test_a_model_that_ends_inside_a_call_leaves_whole_arguments_and_a_limit_does_not() -> None:
    """Arguments that a limit cut must not look complete."""
    text = '<tool_call>{"name": "f", "arguments": {"path": "/tmp/x", "n": [1, {"deep": "/va'
    for is_cut in (False, True):
        [call] = collect(MessageParser(calls=TOOL_FORMATS["hermes"].parser(NAMES, None)).parse(text, is_cut)).calls
        assert call.arguments == '{"path": "/tmp/x", "n": [1, {"deep": "/va' + ("" if is_cut else '"}]}')


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls_that_are_cut_leave_no_markup(name: ToolCallParserName) -> None:
    """Wherever max_tokens cuts it: a grammar made the model call, so there is no content."""
    text = TOOL_FORMATS[name].syntax.write([("get_weather", '{"city": "Paris"}'), ("f", "{}")])
    for end in range(len(text) + 1):
        parser = MessageParser(calls=TOOL_FORMATS[name].parser(NAMES, None, is_forced=True))
        message = collect(parser.parse(text[:end], is_cut=end < len(text)))
        assert message.content == ""
        assert '{"city": "Paris"}'.startswith(message.calls[0].arguments if message.calls else "")
    assert [call.name for call in message.calls] == ["get_weather", "f"]


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("[CALL_ID]", "[ARGS]", "```json\n", "```", "<|python_start|>", "<|python_end|>", "<think>", "</think>"),
    *DEEPSEEK.values(),
    *('{"name": "f", "arguments": ', '"parameters": ', "{", "}", "[", "]", "(", ")", '"', "'", ":", ",", ";", "\\"),
    *(
        "f(a=",
        "get_weather",
        "\\u00e9",
        "\\ud83d",
        "True",
        "null",
        "-1.5e3",
        "function",
        " ",
        "\n",
        "é",
        "😀",
        "<",
        "\0",
    ),
]


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_no_output_breaks_a_parser(data: st.DataObject) -> None:
    """Mutated and random outputs: pieces change nothing, no text is lost, arguments are always JSON objects."""
    name = data.draw(st.sampled_from(sorted(TOOL_FORMATS)))
    texts = [text for known, text in TEXTS if known == name]
    parts = data.draw(st.lists(st.sampled_from([*PIECES, *texts]) | st.text(max_size=3), max_size=14))
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    content, calls = parsed(name, [text])
    assert parsed(name, pieces) == parsed(name, text) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls:
        assert content == text


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_text_that_is_cut_after_a_call_has_no_rest_of_a_marker(name: ToolCallParserName) -> None:
    syntax = TOOL_FORMATS[name].syntax
    text = syntax.write([("f", '{"a": 1}')])
    for end in range(len(text) - len(syntax.end) - len(syntax.suffix), len(text)):
        assert parsed(name, [text[:end]])[0] == ""


def test_only_the_wanted_number_of_calls_is_kept() -> None:
    name, text = TEXTS[1]
    assert [called for called, _ in parsed(name, [text], max_calls=1)[1]] == ["get_weather"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_format_writes_it_reads(name: ToolCallParserName) -> None:
    calls = [("get_weather", '{"city": "a}b\\"c"}'), ("f", "{}")]
    assert parsed(name, [TOOL_FORMATS[name].syntax.write(calls)]) == ("", calls)


BOMBS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": ', "{", '["', '\\"', "<tool_call"],
    "llama3": ['{"a":', "<|python_tag|>{", "<|python"],
    "mistral": ["[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS"],
    "deepseekv3": [DEEPSEEK["call▁begin"], DEEPSEEK["sep"], DEEPSEEK["calls▁begin"]],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", "<|channel|>commentary to=functions.f<|message|>{", "<|ca"],
    "pythonic": ["[f(a=", "[f(a='\\", "{'a':", "((", "f(", "-"],
}


def num_calls(name: ToolCallParserName, text: str) -> int:
    """Calls of Python functions for a text in pieces of five characters. The reader may hold a marker, and no more."""
    parser = TOOL_FORMATS[name].parser(NAMES, None)

    def parse() -> None:
        for start in range(0, len(text), 5):
            parser.feed(text[start : start + 5])
            assert len(parser._reader._text) - parser._reader._position < 40
        parser.end()

    return num_python_calls(parse)


@pytest.mark.parametrize(("name", "piece"), [(name, piece) for name, pieces in BOMBS.items() for piece in pieces])
def test_hostile_output_is_parsed_in_linear_time(name: ToolCallParserName, piece: str) -> None:
    opening = {"pythonic": "[f(a=", "hermes": '<tool_call>{"name": "f", "arguments": '}.get(name, "")
    short, long = (num_calls(name, opening + piece * (size // len(piece))) for size in (2_000, 8_000))
    assert long < 4.5 * short


TEMPLATES: dict[str, ToolCallParserName | None] = {
    "{% if tools %}<tools>{% endif %}<tool_call>\n": "hermes",
    "{% if tools %}<tool_call>\n<function={{ name }}>": None,  # Qwen 3 Coder
    "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]": "mistral",
    "<|python_tag|>{{ tools }}": "llama3",
    '<|start_header_id|>{{ tools }}{"name": function name, "parameters": dictionary}': "llama3",
    deepseek("[calls▁begin][call▁begin]{{ type }}[sep]{{ name }}\n```json\n"): "deepseekv3",
    deepseek("[calls▁begin][call▁begin]{{ name }}[sep]{{ arguments }}"): "deepseekv31",
    "[func_name1(params_name1=params_value1)]": "pythonic",
    "{{ tools }}<|start|>assistant<|channel|>final<|message|>": "gpt-oss",
    "<|tool_call>call:{{ name }}{": "gemma4",
    "{{ messages }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_a_format_is_recognized_by_its_template(template: str, name: ToolCallParserName | None) -> None:
    assert detected_format(template) == name


def test_every_name_of_the_options_has_a_format() -> None:
    assert set(TOOL_FORMATS) == set(get_args(ToolCallParserName))
    assert set(REASONING_FORMATS) == set(get_args(ReasoningParserName))


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_a_configuration_error(option: str) -> None:
    with pytest.raises(ValueError, match=f"server.{option}\n.*Input should be '"):
        AppConfig.model_validate({"server": {option: "gpt5"}})
