"""Reasoning is separated from the answer, whatever pieces the text arrives in."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.server.config import ReasoningParserName
from specray.server.model_output.events import collect
from specray.server.model_output.parser import MessageParser
from specray.server.model_output.reasoning import REASONING_FORMATS
from specray.server.tool_calls.formats import TOOL_FORMATS
from tests.support.python_calls import num_python_calls

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
# parser, end of the prompt, text, reasoning, content
CASES: list[tuple[ReasoningParserName, str, str, str, str]] = [
    ("qwen3", "assistant\n", "<think>\nIt is 4.\n</think>\n\nFour.", "It is 4.", "Four."),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Four.", "", "Four."),
    ("qwen3", "assistant\n<think>\n", "It is 4.\n</think>\n\nFour.\n", "It is 4.", "Four.\n"),
    ("qwen3", "assistant\n", "  no <think> here </think>", "", "  no <think> here </think>"),
    ("qwen3", "", "", "", ""),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nIt is 4.\n<channel|>Four.", "It is 4.", "Four."),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Four.", "", "Four."),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<|tool_call>call:f{}", "Hm.", "<|tool_call>call:f{}"),
    ("deepseek-r1", "<think>\n", "Hmm.</think>Four.", "Hmm.", "Four."),
    ("deepseek-r1", "", "<think>Hmm.</think>\nFour.", "Hmm.", "Four."),
    ("deepseek-r1", "</think>", "Four.", "", "Four."),
    ("deepseek-r1", "", "Hmm. No end </thin", "Hmm. No end </thin", ""),
]


def parsed(name: ReasoningParserName, prompt: str, pieces: list[str]) -> tuple[str, str, int]:
    parser = MessageParser(REASONING_FORMATS[name].parser(prompt), TOOL_FORMATS["hermes"].parser(("f",), None))
    message = collect([event for piece in pieces for event in parser.feed(piece)] + parser.end())
    return message.reasoning, message.content, len(message.calls)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_separated(
    name: ReasoningParserName, prompt: str, text: str, reasoning: str, content: str
) -> None:
    assert parsed(name, prompt, [text]) == (reasoning, content, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pieces_of_a_text_give_the_same_message(data: st.DataObject) -> None:
    name, prompt, text, _, _ = data.draw(st.sampled_from(CASES))
    text += data.draw(st.sampled_from(["", CALL, f"\n{CALL}\n</think>", "<think>"]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    assert parsed(name, prompt, pieces) == parsed(name, prompt, [text]) == parsed(name, prompt, list(text))


def test_a_call_in_the_reasoning_is_reasoning() -> None:
    assert parsed("deepseek-r1", "", [f"{CALL}</think>{CALL}"]) == (CALL, "", 1)


@pytest.mark.parametrize(
    "piece",
    [
        "<|channel|>",
        "<|message|>",
        "<|channel|>analysis<|message|>",
        "<|st",
        " to=",
        "<think>",
        "</think",
        "<think",
        "<",
        "\n",
        "<think>\n</think>",
        " ",
    ],
)
@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_hostile_output_is_parsed_in_linear_time(name: ReasoningParserName, piece: str) -> None:
    """Counted in calls of Python functions, for a text in pieces of five characters."""
    short, long = (num_calls(name, piece * (size // len(piece))) for size in (2_000, 8_000))
    assert long < 4.5 * short


def num_calls(name: ReasoningParserName, text: str) -> int:
    parser = REASONING_FORMATS[name].parser("")

    def parse() -> None:
        for start in range(0, len(text), 5):
            parser.feed(text[start : start + 5])
        parser.end()

    return num_python_calls(parse)
