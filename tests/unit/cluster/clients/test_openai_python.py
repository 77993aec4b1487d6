"""The openai package against a whole server in one process: sync and async, complete and streamed.

Every object that the SDK returns is validated against the SDK's own types, which it does not do itself.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.unit.cluster.conftest import TEXT, Serve, Server

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [USER], "max_tokens": 12, "seed": 1}
TEXTS: dict[str, Any] = {"model": "toy", "prompt": "Hi", "max_tokens": 12, "seed": 1}
RESPONSE: dict[str, Any] = {"model": "toy", "input": "Hi", "max_output_tokens": 12}
FUNCTION = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Scenario(NamedTuple):
    """A call of the SDK: what to send, and what must hold for the reply."""

    endpoint: str  # chat.completions, completions or responses
    arguments: dict[str, Any]
    holds: Callable[[Any], object] = lambda reply: True  # noqa: ARG005
    output: str = TEXT  # what the ranks generate
    streams: bool = True


def first(reply: Any) -> Any:
    return reply.choices[0]


SCENARIOS: dict[str, Scenario] = {
    "chat": Scenario("chat.completions", CHAT, lambda r: first(r).message.content == TEXT[:12]),
    "chat-usage": Scenario("chat.completions", CHAT, lambda r: r.usage.completion_tokens == 12),
    "chat-n": Scenario("chat.completions", CHAT | {"n": 3}, lambda r: [c.index for c in r.choices] == [0, 1, 2]),
    "chat-n-128": Scenario("chat.completions", CHAT | {"n": 128, "max_tokens": 1}, lambda r: len(r.choices) == 128),
    "chat-greedy": Scenario("chat.completions", CHAT | {"temperature": 0}),
    "chat-sampled": Scenario("chat.completions", CHAT | {"temperature": 1.5, "top_p": 0.9}),
    "chat-penalties": Scenario("chat.completions", CHAT | {"presence_penalty": 1, "frequency_penalty": -1}),
    "chat-logit-bias": Scenario("chat.completions", CHAT | {"logit_bias": {"5": 10}}),
    "chat-length": Scenario("chat.completions", CHAT, lambda r: first(r).finish_reason == "length"),
    "chat-stop": Scenario("chat.completions", CHAT | {"stop": " "}, lambda r: first(r).finish_reason == "stop"),
    "chat-stops": Scenario(
        "chat.completions", CHAT | {"stop": ["zz"] * 60 + ["k"]}, lambda r: first(r).message.content == "The quic"
    ),
    "chat-no-tokens": Scenario("chat.completions", CHAT | {"max_tokens": 0}, lambda r: r.usage.completion_tokens == 0),
    "chat-max-completion-tokens": Scenario(
        "chat.completions", CHAT | {"max_completion_tokens": 5}, lambda r: r.usage.completion_tokens == 5
    ),
    "chat-logprobs": Scenario(
        "chat.completions", CHAT | {"logprobs": True}, lambda r: len(first(r).logprobs.content) == 12
    ),
    "chat-top-logprobs": Scenario(
        "chat.completions",
        CHAT | {"logprobs": True, "top_logprobs": 2},
        lambda r: all(len(entry.top_logprobs) == 2 for entry in first(r).logprobs.content),
    ),
    "chat-system": Scenario(
        "chat.completions", CHAT | {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    ),
    "chat-developer": Scenario("chat.completions", CHAT | {"messages": [{"role": "developer", "content": "x"}, USER]}),
    "chat-parts": Scenario(
        "chat.completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    ),
    "chat-turns": Scenario(
        "chat.completions", CHAT | {"messages": [USER, {"role": "assistant", "content": "Yes"}, USER]}
    ),
    "chat-empty-turn": Scenario(
        "chat.completions", CHAT | {"messages": [USER, {"role": "assistant", "content": None}, USER]}
    ),
    "chat-harmless": Scenario(
        "chat.completions", CHAT | {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    ),
    "chat-prediction": Scenario("chat.completions", CHAT | {"prediction": {"type": "content", "content": TEXT}}),
    "chat-text-format": Scenario("chat.completions", CHAT | {"response_format": {"type": "text"}}),
    "chat-tools-unused": Scenario(
        "chat.completions", CHAT | {"tools": [TOOL]}, lambda r: first(r).message.tool_calls is None
    ),
    "chat-tools-none": Scenario("chat.completions", CHAT | {"tools": [TOOL], "tool_choice": "none"}),
    "chat-tool-call": Scenario(
        "chat.completions",
        CHAT | {"tools": [TOOL], "max_tokens": len(CALL)},
        lambda r: json.loads(first(r).message.tool_calls[0].function.arguments) == {"a": 1},
        CALL,
    ),
    "chat-tool-result": Scenario(
        "chat.completions",
        CHAT
        | {
            "tools": [TOOL],
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"},
            ],
        },
    ),
    "chat-effort": Scenario("chat.completions", CHAT | {"reasoning_effort": "low"}),
    "chat-our-options": Scenario(
        "chat.completions",
        CHAT
        | {
            "extra_body": {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "allowed_token_ids": [1, 2], "rid": "x"}
        },
    ),
    "chat-unicode": Scenario(
        "chat.completions", CHAT | {"max_tokens": 30}, lambda r: "é 🎉" in first(r).message.content
    ),
    "text": Scenario("completions", TEXTS, lambda r: first(r).text == TEXT[:12]),
    "text-default-length": Scenario(
        "completions", TEXTS | {"max_tokens": None}, lambda r: r.usage.completion_tokens == 16
    ),
    "text-batch": Scenario("completions", TEXTS | {"prompt": ["a", "b", "c"]}, lambda r: len(r.choices) == 3),
    "text-ids": Scenario("completions", TEXTS | {"prompt": [5, 6]}, lambda r: r.usage.prompt_tokens == 2),
    "text-ids-batch": Scenario("completions", TEXTS | {"prompt": [[5], [6, 7]]}, lambda r: r.usage.prompt_tokens == 3),
    "text-n": Scenario("completions", TEXTS | {"prompt": ["a", "b"], "n": 2}, lambda r: len(r.choices) == 4),
    "text-best-of": Scenario(
        "completions", TEXTS | {"n": 2, "best_of": 4}, lambda r: len(r.choices) == 2, streams=False
    ),
    "text-echo": Scenario("completions", TEXTS | {"echo": True}, lambda r: first(r).text == "Hi" + TEXT[:12]),
    "text-logprobs": Scenario("completions", TEXTS | {"logprobs": 2}, lambda r: len(first(r).logprobs.tokens) == 12),
    "text-stop": Scenario("completions", TEXTS | {"stop": ["u"]}, lambda r: first(r).text == "The q"),
    "text-suffix-empty": Scenario("completions", TEXTS | {"suffix": ""}),
    "text-no-tokens": Scenario("completions", TEXTS | {"max_tokens": 0, "echo": True}, lambda r: first(r).text == "Hi"),
    "text-our-options": Scenario(
        "completions", TEXTS | {"extra_body": {"ignore_eos": True, "min_tokens": 3, "truncate_prompt_tokens": 1}}
    ),
    "response": Scenario("responses", RESPONSE, lambda r: r.output_text == TEXT[:12]),
    "response-incomplete": Scenario(
        "responses", RESPONSE, lambda r: r.incomplete_details.reason == "max_output_tokens"
    ),
    "response-complete": Scenario(
        "responses",
        RESPONSE | {"extra_body": {"stop": "q"}},
        lambda r: (r.status, r.output_text) == ("completed", "The "),
    ),
    "response-empty": Scenario(
        "responses", RESPONSE | {"extra_body": {"stop": "T"}}, lambda r: r.output[0].content[0].text == ""
    ),
    "response-usage": Scenario("responses", RESPONSE, lambda r: r.usage.output_tokens == 12),
    "response-instructions": Scenario("responses", RESPONSE | {"instructions": "Be brief."}, lambda r: r.instructions),
    "response-turns": Scenario(
        "responses", RESPONSE | {"input": [USER, {"role": "assistant", "content": "Yes"}, USER]}
    ),
    "response-parts": Scenario(
        "responses", RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}
    ),
    "response-stateless": Scenario(
        "responses", RESPONSE | {"store": False, "include": ["reasoning.encrypted_content"]}, lambda r: r.store is False
    ),
    "response-metadata": Scenario("responses", RESPONSE | {"metadata": {"a": "b"}}, lambda r: r.metadata == {"a": "b"}),
    "response-logprobs": Scenario(
        "responses",
        RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        lambda r: len(r.output[0].content[0].logprobs) == 12,
    ),
    "response-sampling": Scenario(
        "responses", RESPONSE | {"temperature": 0.5, "top_p": 0.5}, lambda r: (r.temperature, r.top_p) == (0.5, 0.5)
    ),
    "response-tool-call": Scenario(
        "responses",
        RESPONSE | {"tools": [{"type": "function", **FUNCTION, "strict": False}], "max_output_tokens": len(CALL)},
        lambda r: json.loads(r.output[0].arguments) == {"a": 1},
        CALL,
    ),
    "response-tool-result": Scenario(
        "responses",
        RESPONSE
        | {
            "tools": [{"type": "function", **FUNCTION, "strict": None}],
            "input": [
                USER,
                {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "3"},
            ],
        },
    ),
    "response-effort": Scenario(
        "responses", RESPONSE | {"reasoning": {"effort": "low"}}, lambda r: r.reasoning.effort == "low"
    ),
    "response-text-format": Scenario("responses", RESPONSE | {"text": {"format": {"type": "text"}}}),
}


def strict(value: Any) -> Any:
    """The same object, after a strict validation of everything in it."""
    fields = value.to_dict(mode="json")
    for choice in fields.get("choices", []):
        if "text" in choice and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"  # the SDK's type forbids the null that OpenAI's own chunks have
    type(value).model_validate(fields, strict=True)
    return value


class LoopTransport(httpx.BaseTransport):
    """Sends a synchronous client's requests to an application that runs in another thread's event loop."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> httpx.Response:
            asynchronous = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            response = await self._inner.handle_async_request(asynchronous)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return asyncio.run_coroutine_threadsafe(send(), self._loop).result(timeout=20)


def call(client: Any, endpoint: str, **arguments: Any) -> Any:
    for name in endpoint.split("."):
        client = getattr(client, name)
    return client.create(**arguments)


def use_sync(server: Server, loop: asyncio.AbstractEventLoop, scenario: Scenario, stream: bool) -> Any:
    """The reply, or the list of its chunks."""
    with httpx.Client(transport=LoopTransport(server, loop)) as http:
        client = openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
        reply = call(client, scenario.endpoint, **scenario.arguments, stream=stream)
        return [strict(chunk) for chunk in reply] if stream else strict(reply)


async def use_async(server: Server, scenario: Scenario, stream: bool) -> Any:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=server.http, max_retries=0)
    reply = await call(client, scenario.endpoint, **scenario.arguments, stream=stream)
    return [strict(chunk) async for chunk in reply] if stream else strict(reply)


async def use(kind: str, server: Server, scenario: Scenario, stream: bool) -> Any:
    if kind == "sync":
        return await asyncio.to_thread(use_sync, server, asyncio.get_running_loop(), scenario, stream)
    return await use_async(server, scenario, stream)


def run(serve: Serve, scenario: Scenario, body: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with serve(longest=1024) as server:
            server.ranks.script = server.ranks.tokenizer.encode(scenario.output)
            await body(server)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_returns_what_the_sdk_declares(serve: Serve, name: str, kind: str) -> None:
    scenario = SCENARIOS[name]

    async def body(server: Server) -> None:
        reply = await use(kind, server, scenario, stream=False)
        assert scenario.holds(reply), reply

    run(serve, scenario, body)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.streams])
def test_a_stream_adds_up_to_the_complete_reply(serve: Serve, name: str, kind: str) -> None:
    scenario = SCENARIOS[name]

    async def body(server: Server) -> None:
        chunks = await use(kind, server, scenario, stream=True)
        whole = await use(kind, server, scenario, stream=False)
        if scenario.endpoint == "responses":
            assert shown(chunks[-1].response) == shown(whole)
            texts = [event.delta for event in chunks if event.type == "response.output_text.delta"]
            assert "".join(texts) == whole.output_text
            assert [event.sequence_number for event in chunks] == list(range(len(chunks)))
            return
        for choice in whole.choices:
            parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
            if scenario.endpoint == "completions":
                assert "".join(part.text for part in parts) == choice.text
            else:
                assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
                calls = [call for part in parts for call in part.delta.tool_calls or []]
                arguments = "".join(call.function.arguments or "" for call in calls)
                assert arguments == "".join(call.function.arguments for call in choice.message.tool_calls or [])

    run(serve, scenario, body)


def shown(response: Any) -> dict[str, Any]:
    """A response without what differs between two calls: IDs, times and speeds."""
    fields: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "seed", "usage"):
        del fields[name]
    for item in fields["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
    return fields


@pytest.mark.parametrize(
    ("arguments", "error", "param"),
    [
        (CHAT | {"model": "other"}, openai.NotFoundError, "model"),
        (CHAT | {"temperature": -1}, openai.BadRequestError, "temperature"),
        (CHAT | {"n": 129}, openai.BadRequestError, "n"),
        (CHAT | {"messages": []}, openai.BadRequestError, "messages"),
        (CHAT | {"messages": [{"role": "user", "content": None}]}, openai.BadRequestError, "messages.0"),
        (CHAT | {"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        (CHAT | {"prediction": {"type": "content", "content": "x" * 1025}}, openai.BadRequestError, "prediction"),
        (CHAT | {"modalities": ["audio"]}, openai.BadRequestError, "modalities"),
        (CHAT | {"extra_body": {"stop_regex": "a+"}}, openai.BadRequestError, "stop_regex"),
        (TEXTS | {"suffix": "x"}, openai.BadRequestError, "suffix"),
        (TEXTS | {"best_of": 1, "n": 2}, openai.BadRequestError, "best_of"),
        (RESPONSE | {"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        (RESPONSE | {"store": True}, openai.BadRequestError, "store"),
        (RESPONSE | {"background": True}, openai.BadRequestError, "background"),
        (RESPONSE | {"truncation": "auto"}, openai.BadRequestError, "truncation"),
        (RESPONSE | {"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools.0.type"),
        (RESPONSE | {"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "input.0"),
        (RESPONSE | {"include": ["file_search_call.results"]}, openai.BadRequestError, "include.0"),
    ],
)
def test_errors_are_the_sdks_and_name_the_field(
    serve: Serve, arguments: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    endpoint = "responses" if "input" in arguments else "completions" if "prompt" in arguments else "chat.completions"

    async def main() -> None:
        async with serve() as server:
            with pytest.raises(error) as caught:
                await use_async(server, Scenario(endpoint, arguments), stream=False)
            assert caught.value.param == param

    asyncio.run(main())


def test_models_are_listed_and_found(serve: Serve) -> None:
    async def main() -> None:
        async with serve() as server:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=server.http, max_retries=0
            )
            assert [strict(model).id async for model in client.models.list()] == ["toy"]
            assert strict(await client.models.retrieve("toy")).object == "model"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")
            count = await client.responses.input_tokens.count(model="toy", input="Hi")
            answered = await client.responses.create(**RESPONSE)
            assert answered.usage is not None
            assert strict(count).input_tokens == answered.usage.input_tokens

    asyncio.run(main())


def test_a_failed_stream_of_a_response_ends_with_an_error_event(serve: Serve) -> None:
    async def main() -> None:
        async with serve(step_s=0.01, server={"failover_s": 0.0}) as server:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=server.http, max_retries=0
            )
            asking = asyncio.create_task(client.responses.create(**RESPONSE | {"max_output_tokens": 400}, stream=True))
            await server.until(lambda: server.ranks.num_steps > 3)
            server.ranks.broken = "gone"
            events = [strict(event) async for event in await asking]
            assert events[-1].type == "error"
            assert events[-1].sequence_number == len(events) - 1

    asyncio.run(main())
