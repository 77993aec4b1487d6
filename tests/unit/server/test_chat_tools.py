"""Tools and reasoning over HTTP, with OpenAI's client: what is rendered, what is returned, whole and streamed."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from transformers import PreTrainedTokenizerFast

from specray.server.chat.messages import Message
from specray.server.config import ToolCallParserName
from tests.support.scripted_server import Serve, Server, listening
from tests.unit.server.in_process_clients import MODEL, answer_with, openai_client
from tests.unit.server.test_tool_calls import CASES, Calls

WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER_SCHEMA}},
    {"type": "function", "function": {"name": "f"}},
]
USER: list[Any] = [{"role": "user", "content": "hi"}]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "seed": 1, "max_tokens": 300}
PAGE = Path(__file__).parents[3] / "docs/tools.md"
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[-1].content }}"


@pytest.fixture(autouse=True)
def _template(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + "{# <tool_call> #}")


async def streamed(server: Server, **options: Any) -> tuple[Any, list[Any]]:
    """The message that OpenAI's client assembles from a stream, and the chunks."""
    chunks = []
    async with openai_client(server).chat.completions.stream(**options) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        return (await stream.get_final_completion()).choices[0], chunks


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_whole_and_streamed_replies_have_the_same_calls(
    serve: Serve,
    tokenizer: PreTrainedTokenizerFast,
    parser: ToolCallParserName,
    text: str,
    content: str,
    calls: Calls,
) -> None:
    async def scenario() -> None:
        async with serve(server={"tool_call_parser": parser}) as server:
            answer_with(server, tokenizer, text)
            whole = (await openai_client(server).chat.completions.create(**ASKED)).choices[0]
            choice, chunks = await streamed(server, **ASKED)
            for found in (whole, choice):
                assert (found.message.content or "") == content
                assert [
                    (call.type, call.function.name, json.loads(call.function.arguments))
                    for call in found.message.tool_calls or []
                ] == [("function", *call) for call in calls]
                assert found.finish_reason == ("tool_calls" if calls else "stop")
            assert whole.message.content is None or not calls or content
            assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])

    asyncio.run(scenario())


def test_the_deltas_of_a_call_have_openais_shape(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        async with serve(server={"stream_interval_ms": 0}) as server:
            answer_with(server, tokenizer, "Wait. " + HERMES)
            reply = await server.http.post("/v1/chat/completions", json=ASKED | {"stream": True})
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
            first, *others = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
            assert [set(call) for call in first] == [{"index", "id", "type", "function"}]
            assert first[0]["function"] == {"name": "get_weather", "arguments": ""}
            assert all([set(call) for call in calls] == [{"index", "function"}] for calls in others)
            arguments = "".join(calls[0]["function"]["arguments"] for calls in others)
            assert (len(others) > 2, arguments) == (True, '{"city": "Paris"}')
            assert (deltas[-1], json.loads(lines[-1])["choices"][0]["finish_reason"]) == ({}, "tool_calls")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "num_calls", "finish"),
    [
        ({}, 2, "tool_calls"),
        ({"tool_choice": "auto"}, 2, "tool_calls"),
        ({"tool_choice": "required"}, 2, "tool_calls"),
        ({"parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, 2, "stop"),
        ({"tool_choice": "none"}, 0, "stop"),
        ({"tools": []}, 0, "stop"),
        ({"max_tokens": 70}, 1, "length"),
    ],
)
def test_options_decide_which_calls_are_returned(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any], num_calls: int, finish: str
) -> None:
    async def scenario() -> None:
        async with serve() as server:
            answer_with(server, tokenizer, HERMES + HERMES)
            choice = (await openai_client(server).chat.completions.create(**ASKED | options)).choices[0]
            assert (len(choice.message.tool_calls or []), choice.finish_reason) == (num_calls, finish)
            assert (choice.message.content is None) is (num_calls > 0)
            if finish != "length":  # which OpenAI's client raises as an error
                last, _ = await streamed(server, **ASKED | options)
                assert (len(last.message.tool_calls or []), last.finish_reason) == (num_calls, finish)

    asyncio.run(scenario())


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_the_documentations_examples_run(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenAI's and Anthropic's clients over a socket; the scripted model calls the function in every turn."""

    async def scenario() -> None:
        async with serve() as server, listening(server) as url:
            answer_with(server, tokenizer, HERMES)
            for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
                await asyncio.to_thread(exec, block.replace("http://127.0.0.1:8000", url), {})

    asyncio.run(scenario())
    assert capsys.readouterr().out == f"None\n[TextBlock(citations=None, text={HERMES!r}, type='text')]\n"


NESTED: dict[str, Any] = {}
for _ in range(40):
    NESTED = {"properties": NESTED}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 300_000}}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"__class__": 1}}}, "chat_template_kwargs.__class__"),
        ({"extra_body": {"chat_template_kwargs": {"x": [1]}}}, "chat_template_kwargs.x"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
def test_invalid_options_are_refused_by_name(serve: Serve, options: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with serve(server={"max_body_bytes": 2**20}) as server:
            create = openai_client(server).chat.completions.create
            with pytest.raises(BadRequestError) as refused:
                await create(**ASKED | options)
            assert (refused.value.param or "").startswith(param)

    asyncio.run(scenario())


def test_a_template_with_an_unknown_format_needs_the_option(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        tokenizer.chat_template = TEMPLATE + "{# <tool_call><function=name> #}"
        async with serve() as server:
            create = openai_client(server).chat.completions.create
            with pytest.raises(BadRequestError, match="--tool-call-parser"):
                await create(**ASKED)
            assert (await create(**ASKED | {"tool_choice": "none"})).choices[0].finish_reason
        async with serve(server={"tool_call_parser": "hermes"}) as server:
            answer_with(server, tokenizer, HERMES)
            reply = await openai_client(server).chat.completions.create(**ASKED)
            assert reply.choices[0].finish_reason == "tool_calls"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "reasoning", "content"),
    [
        ({}, "Two and two.", "Four."),
        ({"extra_body": {"separate_reasoning": False}}, None, "Two and two.</think>\n\nFour."),
        ({"extra_body": {"include_reasoning": False}}, None, "Four."),
    ],
)
def test_reasoning_is_apart_from_the_content(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any], reasoning: str | None, content: str
) -> None:
    async def scenario() -> None:
        async with serve(server={"reasoning_parser": "deepseek-r1"}) as server:
            answer_with(server, tokenizer, "Two and two.</think>\n\nFour.")
            asked: dict[str, Any] = {"model": MODEL, "messages": USER} | options
            message = (await openai_client(server).chat.completions.create(**asked)).choices[0].message
            assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
            deltas = [
                chunk.choices[0].delta
                async for chunk in await openai_client(server).chat.completions.create(**asked, stream=True)
            ]
            assert "".join(delta.content or "" for delta in deltas) == content
            for field in ("reasoning_content", "reasoning"):  # SGLang's and vLLM's
                shown = "".join(getattr(delta, field, None) or "" for delta in deltas)
                assert shown == (reasoning or "")
            assert getattr(message, "reasoning", None) == reasoning

    asyncio.run(scenario())


def test_a_call_in_reasoning_that_stays_content_is_no_call(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        async with serve(server={"reasoning_parser": "qwen3"}) as server:
            text = f"<think>\nSay {HERMES}?\n</think>\n\n{HERMES}"
            answer_with(server, tokenizer, text)
            asked = ASKED | {"extra_body": {"separate_reasoning": False}}
            message = (await openai_client(server).chat.completions.create(**asked)).choices[0].message
            assert message.content == f"<think>\nSay {HERMES}?\n</think>"
            assert len(message.tool_calls or []) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_act_on_the_answer_and_reasoning_tokens_are_counted(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, stream: bool
) -> None:
    async def scenario() -> None:
        async with serve(server={"reasoning_parser": "deepseek-r1"}) as server:
            answer_with(server, tokenizer, "Two and ur.</think>Four.")
            num_reasoning = len(tokenizer.encode("Two and ur.</think>"))
            client = openai_client(server)
            asked: dict[str, Any] = {"model": MODEL, "messages": USER, "stop": ["ur"]}
            if stream:
                async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                    reply: Any = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(**asked)
            message = reply.choices[0].message
            assert (message.content, message.reasoning_content) == ("Fo", "Two and ur.")
            assert reply.choices[0].finish_reason == "stop"
            assert reply.usage.completion_tokens_details.reasoning_tokens == num_reasoning
            response = await client.responses.create(model=MODEL, input="hi")
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning

    asyncio.run(scenario())


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_messages_reaches_the_template(field: str) -> None:
    message = Message.model_validate({"role": "assistant", "content": "Four.", field: "Two and two."})
    assert message.for_template["reasoning_content"] == "Two and two."
