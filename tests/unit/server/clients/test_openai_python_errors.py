"""What the openai package raises when a server refuses, is too busy, is too slow or goes away; and what a client leaves
behind when it goes away itself."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from specray.cli.local_server import free_port
from tests.support.local_server import served
from tests.support.processes import wait_until
from tests.support.scripted_server import TEXT, Server, make_serve
from tests.unit.server.clients.sdk import KINDS, Ask, Clients, Json, Scripted, content, record
from tests.unit.server.clients.test_openai_python import CALL, CHAT, RESPONSE, TEXTS, TOOL, TOOLS, USER

GRAMMAR_TOOL: Json = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}

KEY = "k" * 32
MAX_BODY = 4096
LONG_TOKENS = 150  # half a second at three tokens a step
LONG: Json = CHAT | {"max_tokens": LONG_TOKENS}


@contextmanager
def server_of(tokenizer: PreTrainedTokenizerFast, **options: Any) -> Iterator[Scripted]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve = make_serve(tokenizer, monkeypatch)
        with served(lambda: serve(**options)) as (url, server):
            clients = Clients.of(url, api_key=KEY)
            yield Scripted(url, server, clients, record(server))
            clients.close()


@pytest.fixture(scope="module")
def keyed(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A server that asks for a key and takes short bodies."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"ada {KEY}\n")
    file.chmod(0o600)
    with server_of(tokenizer, server={"api_key_file": str(file), "max_body_bytes": MAX_BODY}) as server:
        yield server


@pytest.fixture(scope="module")
def busy(tokenizer: PreTrainedTokenizerFast) -> Iterator[Scripted]:
    """A server whose steps take 10 ms, that runs one request and queues one."""
    with server_of(tokenizer, step_s=0.01, max_running_requests=1, max_queued_requests=1) as server:
        yield server


BAD_REQUESTS: dict[str, tuple[Json, str | None, str]] = {
    # what is sent, the field that the error names, part of its message
    "model-type": (CHAT | {"model": 3}, "model", "valid string"),
    "temperature": (CHAT | {"temperature": -1}, "temperature", "temperature=-1"),
    "temperature-text": (CHAT | {"temperature": "hot"}, "temperature", "'hot'"),
    "top-p": (CHAT | {"top_p": -1}, "top_p", "greater than or equal to 0"),
    "top-p-above": (CHAT | {"top_p": 1.5}, "top_p", "less than or equal to 1"),
    "n": (CHAT | {"n": 129}, "n", "128"),
    "n-zero": (CHAT | {"n": 0}, "n", "greater than or equal to 1"),
    "no-messages": (CHAT | {"messages": []}, "messages", "at least 1"),
    "no-content": (CHAT | {"messages": [{"role": "user", "content": None}]}, "messages.0", "content is required"),
    "unknown-role": (CHAT | {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'robot'"),
    "image": (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "only parts of type 'text'",
    ),
    "max-tokens": (CHAT | {"max_tokens": 100_000}, "max_tokens", "maximum context length is 1024 tokens"),
    "max-tokens-negative": (CHAT | {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    "penalty": (CHAT | {"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
    "bias-key": (CHAT | {"logit_bias": {"word": 1}}, None, "word"),
    "bias": (CHAT | {"logit_bias": {"5": 101}}, None, "100"),
    "stops": (CHAT | {"stop": ["x"] * 65}, "stop", "64"),
    "top-logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs", "requires logprobs=true"),
    "many-logprobs": (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    "stream-options": (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    "prediction": (CHAT | {"prediction": {"type": "content", "content": "x" * 1025}}, "prediction", "prediction"),
    "audio": (CHAT | {"modalities": ["audio"]}, "modalities", "does not support modalities"),
    "functions": (CHAT | {"functions": [{"name": "f"}]}, "functions", "does not support functions"),
    "web-search": (CHAT | {"web_search_options": {}}, "web_search_options", "web_search_options"),
    "verbosity": (CHAT | {"verbosity": "low"}, "verbosity", "verbosity='low'"),
    "stop-regex": (CHAT | {"extra_body": {"stop_regex": "a+"}}, "stop_regex", "stop_regex"),
    "two-grammars": (
        CHAT | {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}},
        "response_format",
        "both name a grammar",
    ),
    "format": (CHAT | {"response_format": {"type": "xml"}}, "response_format", "expected an object of type"),
    "schema": (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema",
        "expected an object with a schema",
    ),
    "tool-type": (CHAT | {"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
    "tool-name": (CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "a b"),
    "same-tools": (CHAT | {"tools": [TOOL, TOOL]}, "tools", "two tools are named 'add'"),
    "required-nothing": (CHAT | {"tool_choice": "required"}, "tool_choice", "needs tools"),
    "tool-choice": (CHAT | {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
    "custom-tool-choice": (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        "tool_choice.type",
        "an object of type function or allowed_tools",
    ),
    "tool-choice-name": (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": 3}}},
        "tool_choice.function.name",
        "valid string",
    ),
    "hosted-tool-choice": (
        RESPONSE | {"tool_choice": {"type": "web_search"}},
        "tool_choice.type",
        "tools that OpenAI runs cannot be chosen",
    ),
    "unknown-tool": (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "'x', which is not in tools",
    ),
    "unknown-allowed-tool": (
        CHAT
        | {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
            },
        },
        "tool_choice",
        "'x', which is not in tools",
    ),
    "tool-result": (
        CHAT | {"messages": [USER, {"role": "tool", "content": "3"}]},
        "messages.1",
        "needs the tool_call_id",
    ),
    "suffix": (TEXTS | {"suffix": "x"}, "suffix", "does not support suffix"),
    "best-of": (TEXTS | {"best_of": 1, "n": 2}, "best_of", "less than n=2"),
    "best-of-stream": (TEXTS | {"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    "mixed-prompts": (TEXTS | {"prompt": ["a", [1]]}, "prompt", "expected a string"),
    "empty-ids": (TEXTS | {"prompt": []}, "prompt", "expected a string"),
    "unknown-id": (TEXTS | {"prompt": [300]}, None, "300"),
    "many-choices": (TEXTS | {"prompt": ["a"] * 3, "n": 100}, "n", "300 choices"),
    "background": (RESPONSE | {"background": True}, "background", "set background=false"),
    "truncation": (RESPONSE | {"truncation": "auto"}, "truncation", "disabled"),
    "hosted-tool": (
        RESPONSE | {"tools": [{"type": "web_search"}]},
        "tools",
        "only tools that OpenAI runs (web_search)",
    ),
    "unknown-response-tool": (
        RESPONSE | {"tools": [{"type": "x"}]},
        "tools.0.type",
        "expected a tool of type function, custom",
    ),
    "image-input": (
        RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
        "images, files and audio are not read",
    ),
    "no-input": (RESPONSE | {"input": []}, "input", "send one, or instructions"),
    "grammar-of-a-demanded-call": (
        RESPONSE | {"tools": [GRAMMAR_TOOL], "tool_choice": "required"},
        "tool_choice",
        "grammar of the custom tool 'patch' cannot be enforced",
    ),
    "hosted-tools-allowed": (
        RESPONSE
        | {"tools": [GRAMMAR_TOOL]}
        | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
        "tool_choice",
        "allow a function",
    ),
    "reference": (
        RESPONSE | {"input": [{"type": "item_reference", "id": "x"}]},
        "input.0.type",
        "expected an item of type",
    ),
    "include": (RESPONSE | {"include": ["everything"]}, "include.0", "everything"),
    "conversation": (RESPONSE | {"conversation": "conv_1"}, "conversation", "not stored"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_an_error_that_names_the_field(scripted: Scripted, name: str) -> None:
    arguments, param, message = BAD_REQUESTS[name]
    method = "responses" if "input" in arguments else "completions" if "prompt" in arguments else "chat.completions"
    for kind in KINDS:
        with pytest.raises(openai.BadRequestError) as caught:
            Ask(scripted.clients, kind)(f"{method}.create", **arguments)
        error = caught.value
        assert message in error.message, error.message
        assert param is None or error.param == param
        code = "context_length_exceeded" if name == "max-tokens" else "invalid_value"
        assert (error.type, error.code, error.status_code) == ("invalid_request_error", code, 400)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("endpoint", ["chat.completions", "completions", "responses"])
def test_an_unknown_model_is_not_found(scripted: Scripted, endpoint: str, kind: str) -> None:
    body = {"chat.completions": CHAT, "completions": TEXTS, "responses": RESPONSE}[endpoint] | {"model": "gpt-x"}
    with pytest.raises(openai.NotFoundError, match="model='gpt-x' is not served here; use 'toy'") as caught:
        Ask(scripted.clients, kind)(f"{endpoint}.create", **body)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_model_is_not_listed(scripted: Scripted, kind: str) -> None:
    with pytest.raises(openai.NotFoundError):
        Ask(scripted.clients, kind)("models.retrieve", model="gpt-x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_that_does_not_exist_is_not_found(scripted: Scripted, kind: str) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no route '/v1/embeddings'"):
        Ask(scripted.clients, kind)("embeddings.create", model="toy", input="x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_an_authentication_error(keyed: Scripted, kind: str, stream: bool) -> None:
    clients = Clients.of(keyed.url, api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError, match="missing or invalid API key") as caught:
        Ask(clients, kind).chat(**CHAT, stream=stream)
    clients.close()
    assert caught.value.code == "invalid_api_key"
    assert content(Ask(keyed.clients, kind).chat(**CHAT)) == TEXT[:12]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_body_is_too_large(keyed: Scripted, kind: str) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "x" * MAX_BODY}]}
    with pytest.raises(openai.APIStatusError, match=f"limit of {MAX_BODY} bytes") as caught:
        Ask(keyed.clients, kind).chat(**body)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_host_is_a_permission_error(scripted: Scripted, kind: str) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="is not served without API keys") as caught:
        Ask(scripted.clients, kind).chat(**CHAT, extra_headers={"host": "evil.example.com"})
    assert caught.value.code == "host_not_allowed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_rate_limit_error(busy: Scripted, kind: str, stream: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        under_way = [pool.submit(Ask(busy.clients, "sync").chat, **LONG) for _ in range(2)]
        wait_until(lambda: num_waiting(busy.server) == 1)
        with pytest.raises(openai.RateLimitError, match="queue") as caught:
            Ask(busy.clients, kind).chat(**CHAT, stream=stream)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for reply in under_way:
            assert reply.result().usage.completion_tokens == LONG_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_retries_gets_its_turn(busy: Scripted, kind: str) -> None:
    """The SDK waits as long as Retry-After says."""
    patient = Clients.of(busy.url, max_retries=5)
    with ThreadPoolExecutor(2) as pool:
        under_way = [pool.submit(Ask(busy.clients, "sync").chat, **LONG | {"max_tokens": 60}) for _ in range(2)]
        wait_until(lambda: num_waiting(busy.server) == 1)
        assert content(Ask(patient, kind).chat(**CHAT)) == TEXT[:12]
        assert all(reply.result() for reply in under_way)
    patient.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_gives_up_gets_a_timeout_and_frees_its_request(busy: Scripted, kind: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(Ask(busy.clients, kind).chat, **LONG | {"max_tokens": 400}, timeout=0.5)
        wait_until(lambda: num_running(busy.server) == 1)
        with pytest.raises(openai.APITimeoutError):
            reply.result()
    wait_until(lambda: num_running(busy.server) == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_a_time_limit_ends_with_a_504(busy: Scripted, kind: str) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        Ask(busy.clients, kind).chat(**LONG, extra_body={"timeout": 0.1})
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")


@pytest.mark.parametrize("endpoint", ["chat.completions", "completions", "responses"])
def test_a_stream_with_a_time_limit_ends_with_an_error(busy: Scripted, endpoint: str) -> None:
    body = {"chat.completions": LONG, "completions": TEXTS, "responses": RESPONSE}[endpoint]
    limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    for kind in KINDS:
        ask = Ask(busy.clients, kind)
        arguments = body | {limit: 400, "stream": True, "extra_body": {"timeout": 0.15}}
        if endpoint == "responses":
            events = ask(f"{endpoint}.create", **arguments)
            assert (events[-2].type, events[-2].code) == ("error", "timeout")
            assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "server_error")
            assert "timeout of 0.1" in events[-1].response.error.message
            assert events[-1].sequence_number == len(events) - 1
            continue
        with pytest.raises(openai.APIError, match=r"0\.1[45]") as caught:
            ask(f"{endpoint}.create", **arguments)
        assert caught.value.code == "timeout"


def test_a_closed_stream_frees_its_request(busy: Scripted) -> None:
    stream = busy.clients.sync.chat.completions.create(**LONG, stream=True)
    chunks = iter(stream)
    assert next(chunks).choices[0].delta.role == "assistant"
    next(chunks)  # the first chunk is sent before the request reaches the engine
    stream.close()
    wait_until(lambda: num_running(busy.server) == 0)


def test_a_cancelled_task_frees_its_request(busy: Scripted) -> None:
    async def cancel() -> None:
        asking = asyncio.create_task(busy.clients.asynchronous.chat.completions.create(**LONG))
        while num_running(busy.server) == 0:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    busy.clients.runner.run(cancel())
    wait_until(lambda: num_running(busy.server) == 0)


def test_an_aborted_request_ends_with_what_it_has(busy: Scripted) -> None:
    ask = Ask(busy.clients, "sync")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            busy.clients.sync.completions.create, **TEXTS | {"max_tokens": 400}, extra_body={"rid": "mine"}
        )
        wait_until(lambda: num_running(busy.server) == 1)
        ask.post("/abort_request", rid="mine")
        ended = reply.result()
    assert str(ended.choices[0].finish_reason) == "abort"
    assert (TEXT * 20).startswith(ended.choices[0].text)
    assert len(ended.choices[0].text) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_gone_is_a_connection_error(kind: str) -> None:
    clients = Clients.of(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(openai.APIConnectionError):
        Ask(clients, kind).chat(**CHAT)
    clients.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_stream_of_a_response_ends_with_both_events_of_a_failure(
    tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    with server_of(tokenizer, step_s=0.01, server={"failover_s": 0.0}) as failing:
        with ThreadPoolExecutor(1) as pool:
            arguments = RESPONSE | {"max_output_tokens": 400, "stream": True}
            asking = pool.submit(Ask(failing.clients, kind).response, **arguments)
            wait_until(lambda: failing.server.ranks.num_steps > 3)
            failing.server.ranks.broken = "gone"
            events = asking.result()
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert (events[-1].response.status, events[-1].response.usage) == ("failed", None)
        assert events[-1].sequence_number == len(events) - 1


def test_a_call_that_max_tokens_cuts_ends_with_length(scripted: Scripted) -> None:
    scripted.script(CALL)
    reply = Ask(scripted.clients, "sync").chat(**CHAT | {"tools": [TOOL], "max_tokens": len(CALL) - 20})
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls[0].function.name == "add"


def test_errors_keep_the_body_that_the_server_sent(scripted: Scripted) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        Ask(scripted.clients, "sync").chat(**CHAT | {"n": 0})
    assert isinstance(caught.value.response, httpx2.Response)
    assert caught.value.body == caught.value.response.json()["error"]


def num_waiting(server: Server) -> int:
    return len(server.router._engine._engine.scheduler.waiting)


def num_running(server: Server) -> int:
    """Requests that hold a slot or wait for one. One that moves on meanwhile counts twice rather than not at all."""
    engine = server.router._engine
    scheduler = engine._engine.scheduler
    num_waiting = len(engine._arrived) + len(scheduler.waiting)
    return num_waiting + server.router._config.max_running_requests - scheduler.slots.num_free
