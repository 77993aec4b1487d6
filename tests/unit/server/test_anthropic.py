"""/v1/messages with Anthropic's client: messages, tools, thinking, the order of events, errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from specray.errors import EngineDeadError
from specray.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specray.server.anthropic.replies import INVALID_JSON
from tests.support.scripted_server import Serve, Server
from tests.unit.server.in_process_clients import MODEL, answer_with, anthropic_client

TOOLS: list[Any] = [
    {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "f", "description": "d", "input_schema": {"type": "object"}},
]
USER: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 300}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ enable_thinking }}{# <tool_call> #}"
)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
KEY = "0123456789abcdef0123"
ERROR = "invalid_request_error"
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
NAMED_SEARCH = {"type": "tool", "name": "web_search"}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
BEGUN: list[Any] = [*USER, {"role": "assistant", "content": "Once upon"}]
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}
OTHER = {"type": "json_schema", "schema": {"type": "object"}}
CLEAR_THINKING: dict[str, Any] = {"type": "clear_thinking_20251015"}
CLEAR_USES: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}


def with_result(*blocks: Any) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}
    return {"messages": [*USER, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [result]}]}


def edited(edit: dict[str, Any], num_turns: int) -> dict[str, Any]:
    """A conversation of turns that think and use a tool, and an edit of its context."""
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USED]}
    turn = [*USER, answer, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]
    return {"messages": [*turn * num_turns, *USER], "context_management": {"edits": [edit]}}


@pytest.fixture(autouse=True)
def _template(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)


async def events(server: Server, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data. Each one but pings is of a type of Anthropic's SDK."""
    reply = await server.http.post("/v1/messages", json=body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    found = []
    for event in reply.text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in event.split("\n"))
        found.append((name, json.loads(data)))
    for name, fields in found:
        assert fields["type"] == name
        if name not in ("ping", "error"):
            EVENT.validate_python(fields)
    return found


TEXT = {"type": "text", "text": "Sure."}
USE = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
# options, generated text, content without ids, stop reason, stop sequence
REPLIES: list[tuple[dict[str, Any], str, list[Any], str, str | None]] = [
    ({}, "Sure.", [TEXT], "end_turn", None),
    ({}, "", [], "end_turn", None),
    ({"max_tokens": 5}, "Sure. Yes.", [TEXT], "max_tokens", None),
    ({"stop_sequences": ["Yes", "No"]}, "Sure.Yes.", [TEXT], "stop_sequence", "Yes"),
    ({"tools": TOOLS}, f"Sure.\n{CALL}", [TEXT, USE], "tool_use", None),
    ({"tools": TOOLS}, f"{CALL}\n{CALL}", [USE, USE], "tool_use", None),
    (
        {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        CALL * 2,
        [USE],
        "tool_use",
        None,
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}, CALL, [USE], "tool_use", None),
    ({"tools": TOOLS, "tool_choice": {"type": "none"}}, CALL, [{"type": "text", "text": CALL}], "end_turn", None),
    ({"tools": TOOLS}, f"{CALL}Sure.{CALL}", [USE, TEXT, USE], "tool_use", None),
    (
        {"tools": TOOLS, "max_tokens": 52},
        CALL,
        [{"type": "tool_use", "name": "get_weather", "input": {INVALID_JSON: '{"ci'}}],
        "max_tokens",
        None,
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "<think>Two.</think>\n\nSure.",
        [{"type": "thinking", "thinking": "Two.", "signature": ""}, TEXT],
        "end_turn",
        None,
    ),
]


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("type", "text", "name", "input", "thinking", "signature")
    return [{key: block[key] for key in kept if block.get(key) is not None} for block in blocks]


@pytest.mark.parametrize(("options", "text", "content", "reason", "stop"), REPLIES)
def test_whole_and_streamed_messages_are_equal(
    serve: Serve,
    tokenizer: PreTrainedTokenizerFast,
    options: dict[str, Any],
    text: str,
    content: list[Any],
    reason: str,
    stop: str | None,
) -> None:
    async def scenario() -> None:
        async with serve(server={"reasoning_parser": "qwen3"}, disable_radix_cache=True) as server:
            answer_with(server, tokenizer, text)
            create = anthropic_client(server).messages.create
            whole: Message = await create(**ASKED | options)
            async with anthropic_client(server).messages.stream(**ASKED | options) as stream:
                final = await stream.get_final_message()
            for message in (whole, final):
                assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
                assert message.id.startswith("msg_")
                assert (message.stop_reason, message.stop_sequence) == (reason, stop)
            assert without_ids([block.model_dump() for block in whole.content]) == content
            if INVALID_JSON not in str(content):  # Anthropic's client leaves such an input empty
                assert without_ids([block.model_dump() for block in final.content]) == content
            assert whole.usage.input_tokens == final.usage.input_tokens > 0
            assert whole.usage.output_tokens == final.usage.output_tokens > 0
            assert all(block.id.startswith("call_") for block in whole.content if block.type == "tool_use")
            Message.model_validate(whole.model_dump(), strict=True)

    asyncio.run(scenario())


def test_events_are_in_anthropics_order(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        async with serve(server={"stream_interval_ms": 0}) as server:
            answer_with(server, tokenizer, f"Sure.\n{CALL}")
            found = await events(server, **ASKED, tools=TOOLS)
            names = [name for name, _ in found]
            assert names[:3] == ["message_start", "ping", "content_block_start"]
            assert names[-2:] == ["message_delta", "message_stop"]
            blocks = [(name, fields["index"]) for name, fields in found if name.startswith("content_block")]
            assert sorted(blocks, key=lambda block: block[1]) == blocks
            for index in (0, 1):
                own = [name for name, number in blocks if number == index]
                assert (own[0], own[-1]) == ("content_block_start", "content_block_stop")
                assert len(own) > 3
                assert set(own[1:-1]) == {"content_block_delta"}
            start = found[0][1]["message"]
            assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
            deltas = [fields["delta"] for name, fields in found if name == "content_block_delta"]
            assert "".join(d["text"] for d in deltas if d["type"] == "text_delta") == "Sure."
            arguments = "".join(d["partial_json"] for d in deltas if d["type"] == "input_json_delta")
            assert json.loads(arguments) == {"city": "Paris"}

    asyncio.run(scenario())


def rendered(body: dict[str, Any]) -> Any:
    return [message.for_template for message in CountTokensRequest.model_validate(ASKED | body).for_chat().messages]


def test_blocks_become_messages_of_the_chat_template() -> None:
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert rendered({"messages": conversation, "system": [{"type": "text", "text": "s"}]}) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "r"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "d"},
    ]


def test_options_become_those_of_a_chat() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "me"},
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "output_config": {"effort": "low"},
    }
    body = MessagesRequest.model_validate(ASKED | options)
    chat = body.for_chat()
    params = chat.sampling(None)
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.5, 3, 0.9, ["x"])
    assert params.max_tokens == 300
    assert chat.template_variables == {"reasoning_effort": "low", "enable_thinking": False, "thinking": False}
    assert (chat.tool_choice, [tool.function.name for tool in chat.offered_tools]) == ("required", ["get_weather", "f"])
    assert body.ignored_fields == ["metadata"]
    budget = {"thinking": {"type": "enabled", "budget_tokens": 9}}
    assert MessagesRequest.model_validate(ASKED | budget).ignored_fields == ["thinking.budget_tokens"]


LOAD = {"type": "tool_reference", "tool_name": "f"}
NAMED_F = {"type": "tool_reference", "name": "f"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"messages": [*USER, {"role": "system", "content": "Skills: none."}], "system": "Be brief."},
            [("system", "Be brief."), ("user", "hi"), ("system", "Skills: none.")],
        ),
        (with_result(LOAD), [("user", "hi"), ("assistant", ""), ("tool", "f")]),
        (
            with_result({"type": "search_result", "source": "a.md", "title": "A", "content": [TEXT]}),
            [("user", "hi"), ("assistant", ""), ("tool", "A (a.md)\nSure.")],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "document", "title": "T", "source": {"type": "text", "data": "d"}},
                            {"type": "document", "source": {"type": "content", "content": [TEXT]}},
                        ],
                    }
                ]
            },
            [("user", "T\nd\nSure.")],
        ),
        ({"messages": BEGUN}, [("user", "hi"), ("assistant", "Once upon")]),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, [("user", "hi")]),
        (
            {"messages": [*USER, {"role": "system", "content": [{"type": "tool_removal", "tool": NAMED_F}]}]},
            [("user", "hi")],
        ),
    ],
)
def test_what_claude_code_sends_reaches_the_template(body: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert [(message["role"], message["content"]) for message in rendered(body)] == expected


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (USER, ["get_weather"]),
        (with_result(LOAD)["messages"], ["get_weather", "f"]),
        ([*USER, {"role": "system", "content": [{"type": "tool_addition", "tool": NAMED_F}]}], ["get_weather", "f"]),
        (
            [
                *with_result(LOAD)["messages"],
                {"role": "system", "content": [{"type": "tool_removal", "tool": NAMED_F}]},
            ],
            ["get_weather"],
        ),
        (
            [
                *USER,
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "tool_addition",
                            "tool": {"type": "tool_definition", "definition": {"name": "g", "input_schema": {}}},
                        }
                    ],
                },
            ],
            ["get_weather", "g"],
        ),
    ],
)
def test_a_deferred_tool_is_offered_once_the_conversation_refers_to_it(messages: list[Any], names: list[str]) -> None:
    body = ASKED | {"tools": [TOOLS[0], TOOLS[1] | {"defer_loading": True}], "messages": messages}
    chat = MessagesRequest.model_validate(body).for_chat()
    assert [tool.function.name for tool in chat.offered_tools] == names


def test_an_answer_that_the_request_begins_is_continued(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        async with serve() as server:
            answer_with(server, tokenizer, " a time")
            create = anthropic_client(server).messages.create
            message = await create(**ASKED | {"messages": BEGUN})
            assert [block.text for block in message.content if block.type == "text"] == [" a time"]
            assert message.usage.input_tokens == len(tokenizer.encode("[user]hi[assistant]Once upon"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"context_management": {"edits": []}}, "context_management"),
        (edited(CLEAR_THINKING | {"keep": "all"}, 3), "context_management"),
        (edited(CLEAR_THINKING, 1), "context_management"),
        (edited(CLEAR_USES, 4), "context_management"),
        (edited(CLEAR_USES | {"trigger": {"type": "tool_uses", "value": 2}}, 3), "context_management"),
        (edited({"type": "compact_20260112"}, 3), "context_management"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"tools": [*TOOLS, SEARCH]}, "tools.web_search_20250305"),
        ({"thinking": {"type": "adaptive", "x" * 300: 1}}, "thinking." + "x" * 55),
    ],
)
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_changes_nothing_is_accepted_and_named(
    serve: Serve, route: str, body: dict[str, Any], ignored: str
) -> None:
    async def scenario() -> None:
        async with serve(context_length=2048, max_total_tokens=4096) as server:
            reply = await server.http.post(route, json=ASKED | {"max_tokens": 4} | body)
            assert reply.status_code == 200, reply.text
            if route == "/v1/messages":
                assert reply.headers["x-specray-ignored-fields"] == ignored

    asyncio.run(scenario())


@pytest.mark.parametrize("fields", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}])
def test_both_names_of_a_format_are_enforced(fields: dict[str, Any]) -> None:
    grammar = MessagesRequest.model_validate(ASKED | fields).for_chat().grammar
    assert grammar is not None
    assert '"ok"' in grammar.text


def test_counted_tokens_are_those_of_the_message(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            client = anthropic_client(server)
            options: dict[str, Any] = {"model": MODEL, "messages": USER, "system": "Be brief.", "tools": TOOLS}
            counted = await client.messages.count_tokens(**options)
            message = await client.messages.create(**options, max_tokens=1)
            assert counted.input_tokens == message.usage.input_tokens

    asyncio.run(scenario())


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "image"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "role"),
        ({"tools": [SEARCH]}, 400, "invalid_request_error", "only tools that Anthropic runs (web_search_20250305)"),
        ({"tools": [*TOOLS, SEARCH], "tool_choice": NAMED_SEARCH}, 400, "invalid_request_error", "names 'web_search'"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "invalid_request_error",
            "tools.0.type='bash_20250124': the model does",
        ),
        *(
            ({"tools": [{"type": tag, "name": "x"}, *TOOLS]}, 400, ERROR, f"tools.0.type='{tag}'")
            for tag in ("a hosted tool", "[hosted", "hosted", "[text")
        ),
        ({"tools": [tool | {"defer_loading": True} for tool in TOOLS]}, 400, "invalid_request_error", "defer_loading"),
        (with_result(IMAGE), 400, "invalid_request_error", "messages.2.content.0.content.0.type='image': a tool's"),
        (with_result(PDF), 400, "invalid_request_error", "only documents whose source is of type 'text'"),
        ({"messages": [*USER, {"role": "assistant", "content": [USED]}]}, 400, "invalid_request_error", "tool_result"),
        ({"messages": BEGUN, "output_format": FORMAT}, 400, "invalid_request_error", "cannot have a format"),
        ({"output_format": FORMAT, "output_config": {"format": OTHER}}, 400, "invalid_request_error", "differ"),
        (edited(CLEAR_THINKING | {"keep": {"type": "thinking_turns", "value": 1}}, 2), 400, ERROR, "would change"),
        (edited(CLEAR_THINKING, 2), 400, "invalid_request_error", "context_management.edits.0 (clear_thinking"),
        (
            edited(CLEAR_USES | {"trigger": {"type": "tool_uses", "value": 4}}, 4),
            400,
            ERROR,
            "would change this prompt",
        ),
        (
            edited({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 2}}, 0),
            400,
            ERROR,
            "compact",
        ),
        (edited({"type": "clear_all"}, 0), 400, "invalid_request_error", "context_management.edits.0"),
        ({"tools": TOOLS[:1] * 2}, 400, "invalid_request_error", "two tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, 400, "invalid_request_error", "'g'"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"output_config": {"effort": "a lot"}}, 400, "invalid_request_error", "output_config.effort"),
        ({"model": "claude-opus-9"}, 404, "not_found_error", "claude-opus-9"),
        ({"max_tokens": 5000}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 413, "request_too_large", "4096"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(
    serve: Serve, body: dict[str, Any], status: int, kind: str, text: str, stream: bool
) -> None:
    async def scenario() -> None:
        async with serve(server={"max_body_bytes": 4096}) as server:
            reply = await server.http.post("/v1/messages", json=ASKED | {"stream": stream} | body)
            assert reply.status_code == status
            assert reply.json().keys() == {"type", "error", "request_id"}
            assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", kind)
            assert text in reply.json()["error"]["message"]
            assert int(reply.headers["content-length"]) == len(reply.content)

    asyncio.run(scenario())


def test_the_sdks_tool_runner_goes_on_without_threads(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    """It asks for a thread that the server holds, and recognizes the error of a server that has none."""
    called: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "It is sunny."

    async def scenario() -> None:
        async with serve(context_length=2048, max_total_tokens=4096) as server:
            answer_with(server, tokenizer, CALL)
            runner = anthropic_client(server).beta.messages.tool_runner(**ASKED, tools=[get_weather], max_iterations=2)
            assert [message.stop_reason async for message in runner] == ["tool_use", "tool_use"]
            assert called[0] == "Paris"
            refused = await server.http.post("/v1/messages", json=ASKED | {"thread": {"type": "create"}})
            assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"

    asyncio.run(scenario())


def test_the_key_may_be_sent_as_anthropics_clients_do(serve: Serve, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "keys"
        path.write_text(f"me {KEY}\n")
        path.chmod(0o600)
        async with serve(server={"api_key_file": str(path)}) as server:
            assert await anthropic_client(server, KEY).messages.create(**ASKED | {"max_tokens": 1})
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await anthropic_client(server).messages.create(**ASKED)
            assert refused.value.type == "authentication_error"
            assert (await server.http.post("/v1/messages/count_tokens", json=ASKED)).status_code == 401

    asyncio.run(scenario())


def test_a_stream_that_fails_ends_with_an_error_event(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, server={"failover_s": 0.3}) as server:
            request = asyncio.create_task(events(server, **ASKED))
            await server.until(lambda: server.ranks.num_steps > 2)
            server.ranks.broken = "rank 1 died"
            name, fields = (await request)[-1]
            assert (name, fields["error"]["type"]) == ("error", "overloaded_error")
            with pytest.raises(EngineDeadError):
                await server.router.check_health()

    asyncio.run(scenario())
