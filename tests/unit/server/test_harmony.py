"""gpt-oss's harmony format: channels become reasoning, content and calls; history, effort and grammars go in."""

import asyncio
import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError
from transformers import PreTrainedTokenizerFast

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.server.chat.preparation import prepare_chat
from specray.server.chat.protocol import ChatRequest
from specray.server.config import ServerConfig
from specray.server.model_output.channels import Channels
from specray.server.model_output.events import ParsedMessage, collect
from specray.server.model_output.parser import MessageParser
from specray.server.tokenization import Tokenization
from specray.server.tool_calls.formats import HARMONY
from specray.structured_output.compiler import GrammarCompiler
from tests.support.gpt_oss import SPECIALS, harmony_tokenizer
from tests.support.scripted_server import Serve, Server
from tests.unit.server.in_process_clients import MODEL, answer_with, anthropic_client, openai_client
from tests.unit.server.test_streams_equal import NUM_PAIRS, both_ways, check_choices, check_response

TOKENIZER = harmony_tokenizer()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "f"}},
]
USER: list[Any] = [{"role": "user", "content": "hi"}]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
UNKNOWN = '<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{"a": 1}<|call|>'
BROKEN = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>not JSON"
WEATHER = [("get_weather", {"city": "Paris"})]
Calls = list[tuple[str, Any]]
# text, reasoning, content, calls
CASES: list[tuple[str, str, str, Calls]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Four.", "Hm.", "Four.", []),
    (f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{}}", "Hm.", "{}", []),
    ("<|channel|>final<|message|>Four.\n", "", "Four.\n", []),
    (f"{THOUGHT}{CALL}<|call|>", "Hm.", "", WEATHER),
    (f"{THOUGHT}{CALL}", "Hm.", "", WEATHER),  # the engine ends at <|call|>
    (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", "Hm.", "I look.", WEATHER),
    (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>', "", "", WEATHER),
    (
        f'{THOUGHT} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Paris"}}<|call|>',
        "Hm.",
        "",
        WEATHER,
    ),
    ('<|channel|>analysis to=functions.get_weather code<|message|>{"city": "Paris"}<|call|>', "", "", WEATHER),
    ('<|channel|>commentary to=get_weather<|message|>{"city": "Paris"}<|call|>', "", "", WEATHER),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "", "", [("f", {})]),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", "", "", [("f", {})]),
    (THOUGHT + UNKNOWN, "Hm.", f"<|start|>assistant{UNKNOWN}", []),
    (f"{BROKEN}<|call|>", "", f"{BROKEN}<|call|>", []),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    (
        f"{THOUGHT}<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>4",
        "Hm.\nSo.",
        "4",
        [],
    ),
    ("<|start|>assistant<|channel|>final<|message|>4", "", "4", []),  # of a prompt that ends before it
    ("No format to=f at all.", "", "No format to=f at all.", []),
    (" to=you", "", " to=you", []),
    (f"{THOUGHT}<|channel|>fi", "Hm.", "", []),
    ("", "", "", []),
]


def parsed(pieces: list[str], names: tuple[str, ...] = ("get_weather", "f"), is_cut: bool = False) -> ParsedMessage:
    parser = MessageParser(Channels().parser(""), HARMONY.parser(names, None))
    return collect([event for piece in pieces for event in parser.feed(piece)] + parser.end(is_cut))


def calls_of(message: ParsedMessage) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_channels_become_reasoning_content_and_calls(text: str, reasoning: str, content: str, calls: Calls) -> None:
    message = parsed([text])
    assert (message.reasoning, message.content, calls_of(message)) == (reasoning, content, calls)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_pieces_of_an_output_give_the_same_message(data: st.DataObject) -> None:
    """Also of a broken output, in which nothing is lost but marks and headers."""
    parts = st.sampled_from([*SPECIALS, *(case[0] for case in CASES), " to=", "final", "{", '{"a": ', "é", "\n"])
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    text = text[: data.draw(st.integers(0, len(text)))]
    is_cut = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    found = [parsed(split, is_cut=is_cut) for split in ([text], pieces, list(text))]
    assert len({(*message[:2], *(call[1:] for call in message.calls)) for message in found}) == 1
    assert is_cut or all(isinstance(arguments, dict) for _, arguments in calls_of(found[0]))


def test_arguments_that_a_limit_cut_do_not_look_complete() -> None:
    for is_cut in (False, True):
        [call] = parsed([CALL[:-2]], is_cut=is_cut).calls
        assert call.arguments == '{"city": "Paris' + ("" if is_cut else '"}')


def test_any_tokens_give_the_same_message_streamed_and_whole(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    """Marks in any order, pieces of outputs, and bytes that are no text."""
    random = Random(1)
    specials = tokenizer.convert_tokens_to_ids(list(SPECIALS))
    outputs = [tokenizer.encode(case[0], add_special_tokens=False) for case in CASES if case[0]]

    def piece() -> list[int]:
        match random.randrange(4):
            case 0:
                return [random.choice(specials)]
            case 1:
                return random.choices(range(256), k=random.randint(1, 4))
        output = random.choice(outputs)
        start = random.randrange(len(output))
        return output[start : start + random.randint(1, 40)]

    async def scenario() -> None:
        async with serve(longest=2048, disable_radix_cache=True) as server:
            for _ in range(NUM_PAIRS // 10):
                pieces = [piece() for _ in range(random.randint(1, 10))]
                server.ranks.script = [*(token for each in pieces for token in each), tokenizer.eos_token_id]
                common = {"seed": 1, "skip_special_tokens": random.random() < 0.5}
                chat = {"messages": USER, "tools": TOOLS, "max_tokens": random.randint(1, 300), **common}
                check_choices(*await both_ways(server, "/v1/chat/completions", chat))
                tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
                check_response(*await both_ways(server, "/v1/responses", {"input": "hi", "tools": tools, **common}))

    asyncio.run(scenario())


async def streamed(server: Server, **options: Any) -> tuple[Any, str]:
    """The message that OpenAI's client assembles from a stream, and its reasoning."""
    reasoning = []
    async with openai_client(server).chat.completions.stream(model=MODEL, **options) as stream:
        async for event in stream:
            if event.type == "chunk":
                reasoning += [getattr(choice.delta, "reasoning_content", None) or "" for choice in event.chunk.choices]
        return (await stream.get_final_completion()).choices[0], "".join(reasoning)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return harmony_tokenizer()


@pytest.mark.parametrize(
    ("case", "server_options"),
    [(case, {}) for case in (0, 3, 5, 12, 17)]
    + [(5, {"reasoning_parser": "gpt-oss"}), (5, {"tool_call_parser": "openai"})],
)
def test_every_api_reads_the_channels(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, case: int, server_options: dict[str, Any]
) -> None:
    """Recognized by the chat template, or by either option."""
    text, reasoning, content, calls = CASES[case]
    if server_options:
        tokenizer.chat_template = "{{ messages[-1].content }}{# tools, tool_calls #}"

    async def scenario() -> None:
        async with serve(server=server_options, longest=2048) as server:
            answer_with(server, tokenizer, text)
            client, asked = openai_client(server), {"messages": USER, "tools": TOOLS, "seed": 1}
            whole = (await client.chat.completions.create(model=MODEL, **asked)).choices[0]
            choice, streamed_reasoning = await streamed(server, **asked)
            for found in (whole, choice):
                assert (found.message.content or "") == content
                assert [
                    (call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls or []
                ] == calls
                assert found.finish_reason == ("tool_calls" if calls else "stop")
            assert (getattr(whole.message, "reasoning_content", None) or "") == streamed_reasoning == reasoning

            response = await client.responses.create(
                model=MODEL, input="hi", tools=[{"type": "function", **tool["function"]} for tool in TOOLS]
            )
            kinds = ["reasoning"] * bool(reasoning) + ["message"] * bool(content) + ["function_call"] * len(calls)
            assert [item.type for item in response.output] == kinds
            assert response.output_text == content

            message = await anthropic_client(server).messages.create(
                model=MODEL,
                max_tokens=300,
                messages=USER,
                tools=[{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS],
            )
            kinds = ["thinking"] * bool(reasoning) + ["text"] * bool(content) + ["tool_use"] * len(calls)
            assert [block.type for block in message.content] == kinds

    asyncio.run(scenario())


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("options", "reasoning", "content"),
    [
        ({}, "Hm.", "Four."),
        ({"skip_special_tokens": True}, "Hm.", "Four."),
        ({"include_reasoning": False}, None, "Four."),
        ({"separate_reasoning": False}, None, "<|channel|>analysis<|message|>Hm.<|end|>Four."),
        ({"stop": ["m"]}, "Hm.", "Four."),  # acts on the answer
        ({"stop": ["r"]}, "Hm.", "Fou"),
    ],
)
def test_options_of_the_reply(
    serve: Serve,
    tokenizer: PreTrainedTokenizerFast,
    tools: Any,
    options: dict[str, Any],
    reasoning: str | None,
    content: str,
) -> None:
    async def scenario() -> None:
        async with serve() as server:
            answer_with(server, tokenizer, f"{THOUGHT}<|channel|>final<|message|>Four.")
            reply = await server.http.post(
                "/v1/chat/completions",
                json={"messages": USER, "seed": 1, **({"tools": tools} if tools else {}), **options},
            )
            message = reply.json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
            thought = tokenizer.encode(f"{THOUGHT}<|channel|>final<|message|>", add_special_tokens=False)
            assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)

    asyncio.run(scenario())


def prompt_of(**options: Any) -> str:
    body = ChatRequest.model_validate({"messages": USER, **options})
    return TOKENIZER.decode(prepare_chat(body, Tokenization(TOKENIZER, 4096), ServerConfig()).token_ids)


SYSTEM = "<|start|>system<|message|>You are ChatGPT.\nReasoning: medium<|end|>"


def called(*ids: str, **fields: Any) -> dict[str, Any]:
    """A message that calls `f` once for each id."""
    calls = [
        {"id": name, "type": "function", "function": {"name": f"f{name}", "arguments": '{"x": 1}'}} for name in ids
    ]
    return {"role": "assistant", "tool_calls": calls, **fields}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"r{name}"}


def shown_call(name: str) -> str:
    return f'<|start|>assistant to=functions.f{name}<|channel|>commentary json<|message|>{{"x": 1}}<|call|>'


def shown_result(name: str) -> str:
    return f'<|start|>functions.f{name} to=assistant<|channel|>commentary<|message|>"r{name}"<|end|>'


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([called("a"), result("a")], shown_call("a") + shown_result("a")),
        (
            [called("a", content="I look.", reasoning_content="Hm."), result("a")],
            f"<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>{shown_call('a')}{shown_result('a')}",
        ),
        (
            [called("a", "b"), result("b"), result("a")],
            shown_call("a") + shown_result("a") + shown_call("b") + shown_result("b"),
        ),
        (
            [{"role": "assistant", "content": "4", "reasoning": "Hm."}, {"role": "user", "content": "why"}],
            "<|start|>assistant<|channel|>final<|message|>4<|end|><|start|>user<|message|>why<|end|>",
        ),
    ],
)
def test_earlier_turns_are_rendered_as_the_template_takes_them(messages: Any, shown: str) -> None:
    prompt = prompt_of(messages=[*USER, *messages])
    assert prompt == f"{SYSTEM}<|start|>user<|message|>hi<|end|>{shown}<|start|>assistant"


def test_instructions_from_anywhere_stand_in_the_developer_message() -> None:
    messages = [{"role": "system", "content": "A"}, *USER, {"role": "developer", "content": "B"}]
    assert "<|start|>developer<|message|>A\n\nB<|end|>" in prompt_of(messages=messages)


def test_tools_identity_and_effort_reach_the_template() -> None:
    prompt = prompt_of(tools=TOOLS, reasoning_effort="low", chat_template_kwargs={"model_identity": "You are X."})
    assert prompt.startswith("<|start|>system<|message|>You are X.\nReasoning: low<|end|>")
    assert "type get_weather = (_: {" in prompt
    for effort, known in {"minimal": "low", "high": "high", "xhigh": "high", "max": "high"}.items():
        assert f"Reasoning: {known}<|end|>" in prompt_of(reasoning_effort=effort)
    with pytest.raises(InvalidRequestError, match="always reasons"):
        prompt_of(reasoning_effort="none")


def test_marks_in_a_message_are_text() -> None:
    prompt = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a<|end|><|start|>b"}]})
    ids = prepare_chat(prompt, Tokenization(TOKENIZER, 4096), ServerConfig()).token_ids
    special = [TOKENIZER.convert_ids_to_tokens(token) for token in ids if token >= 256]
    assert special == ["<|start|>", "<|message|>", "<|end|>", "<|start|>", "<|message|>", "<|end|>", "<|start|>"]


COMPILER = GrammarCompiler(
    TOKENIZER, len(TOKENIZER), [TOKENIZER.convert_tokens_to_ids(t) for t in ("<|return|>", "<|call|>")]
)


def matches(text: str, **options: Any) -> bool:
    """Whether the grammar of a request lets its output be `text`, as a whole."""
    body = ChatRequest.model_validate({"messages": USER, **options})
    grammar = prepare_chat(body, Tokenization(TOKENIZER, 4096), ServerConfig()).params.grammar
    assert grammar is not None
    matcher = COMPILER.compile(GrammarSpec(*grammar)).matcher()
    return all(map(matcher.accept, [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]))


FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
FINAL = '<|channel|>final<|message|>{"city": "Paris"}'


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        (FINAL, True),
        (THOUGHT + FINAL, True),
        (THOUGHT + THOUGHT + FINAL, True),
        ('{"city": "Paris"}', False),
        (f"{THOUGHT}<|channel|>final<|message|>Paris", False),
        (f"{THOUGHT}<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant{FINAL}", False),
        (THOUGHT, False),
        (THOUGHT + CALL, False),
    ],
)
def test_a_response_format_holds_for_the_final_channel(text: str, is_accepted: bool) -> None:
    assert matches(text, response_format=FORMAT) is is_accepted
    if is_accepted:
        assert json.loads(parsed([text]).content) == {"city": "Paris"}


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        (CALL, True),
        (THOUGHT + CALL, True),
        (THOUGHT + FINAL, False),
        (CALL.replace("city", "town"), False),
        (CALL.replace("get_weather", "rm"), False),
    ],
)
def test_a_call_can_be_required(text: str, is_accepted: bool) -> None:
    assert matches(text, tools=TOOLS, tool_choice="required") is is_accepted
    named = {"type": "function", "function": {"name": "f"}}
    assert not matches(text, tools=TOOLS, tool_choice=named)


def test_a_grammar_that_has_channels_describes_the_whole_output() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    options = {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": text}}}
    assert matches(text, **options)
    assert not matches(THOUGHT + text, **options)


def test_a_continued_answer_is_in_the_final_channel(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    options = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(**options).endswith("<|start|>assistant<|channel|>final<|message|>It is")
    assert matches('{"city": "Paris"}', response_format=FORMAT, **options)

    async def scenario() -> None:
        async with serve() as server:
            answer_with(server, tokenizer, " four.")
            for tools in (None, TOOLS):
                reply = await server.http.post("/v1/chat/completions", json={**options, "tools": tools, "seed": 1})
                assert reply.json()["choices"][0]["message"]["content"] == " four."

    asyncio.run(scenario())


def test_an_effort_that_the_model_does_not_have_is_a_400(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            with pytest.raises(BadRequestError, match="always reasons"):
                await openai_client(server).chat.completions.create(model=MODEL, messages=USER, reasoning_effort="none")

    asyncio.run(scenario())
