"""Bodies of megabytes of small values: their checks end early, because they run on the event loop."""

import asyncio
import gc
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specray.server import middleware
from specray.server.anthropic.protocol import MessagesRequest
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.generate.protocol import GenerateRequest
from specray.server.responses.protocol import ResponsesRequest
from specray.server.schemas.parts import MAX_PARTS
from tests.support.scripted_server import Serve

MANY = 20_000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
CLAUDE: dict[str, Any] = {"model": "m", "max_tokens": 1}
WRONG_KEYS = {f" {number}": 1 for number in range(MANY)}
WRONG: list[Any] = [[1] * MANY, [{}] * MANY, [""] * MANY, [None] * 4000]


def bodies(wrong: list[Any]) -> list[tuple[type[BaseModel], dict[str, Any]]]:
    """Bodies with a list of wrong elements in every place for a list."""
    user = {"role": "user", "content": wrong}
    result = [{"type": "tool_result", "tool_use_id": "a", "content": wrong}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": wrong * 20}}}
    return [
        *((ChatRequest, CHAT | {name: wrong}) for name in ("messages", "stop", "stop_token_ids", "tools")),
        (ChatRequest, {"messages": [user]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": wrong}]}),
        (ChatRequest, CHAT | {"tools": [tool]}),
        *((MessagesRequest, CLAUDE | {"messages": messages}) for messages in (wrong, [user])),
        (MessagesRequest, CLAUDE | {"messages": [{"role": "user", "content": result}]}),
        *((MessagesRequest, CLAUDE | CHAT | {name: wrong}) for name in ("system", "tools", "stop_sequences")),
        *((ResponsesRequest, {"input": items}) for items in (wrong, [user], [{"type": "reasoning", "content": wrong}])),
        (ResponsesRequest, {"input": [{"type": "function_call_output", "call_id": "a", "output": wrong}]}),
        *((ResponsesRequest, {"input": "a", name: wrong}) for name in ("tools", "include")),
        *((GenerateRequest, {"text": "a", name: wrong}) for name in ("sampling_params", "rid", "return_logprob")),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": wrong}),
    ]


def number_of_errors(model: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong[0]))
def test_a_list_of_wrong_elements_is_one_error(wrong: list[Any]) -> None:
    """pydantic would make one of each element: a body of two megabytes took eight seconds."""
    for model, body in bodies(wrong):
        assert number_of_errors(model, body) <= 8, (model, list(body))


@pytest.mark.parametrize("name", ["logit_bias", "chat_template_kwargs"])
def test_an_object_of_wrong_keys_is_one_error(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(CHAT | {name: WRONG_KEYS})
    assert refused.value.error_count() == 1


@pytest.mark.parametrize("text", ["text", "output_text"])
def test_all_messages_together_have_a_number_of_parts(text: str) -> None:
    parts = [{"type": text, "text": ""}] * (MAX_PARTS // 2)
    user, tool = {"role": "user", "content": parts}, {"type": "tool_result", "tool_use_id": "a", "content": parts}
    for body in (
        {"messages": [user, user, {"role": "user", "content": parts[:1]}]},
        {"messages": [user, {"role": "user", "content": [tool]}]},
    ):
        with pytest.raises(ValidationError, match=f"more than {MAX_PARTS} parts"):
            MessagesRequest.model_validate(CLAUDE | body)
    output = {"type": "function_call_output", "call_id": "a", "output": parts}
    with pytest.raises(ValidationError, match=f"more than {MAX_PARTS} parts"):
        ResponsesRequest.model_validate({"input": [user, output, {"role": "user", "content": parts[:1]}]})


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, GenerateRequest, MessagesRequest, ResponsesRequest])
def test_every_list_of_objects_has_a_longest_length(model: type[BaseModel]) -> None:
    """But not the parts of a chat message, which are joined without becoming objects."""
    unbounded: set[str] = set()

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            items = json.dumps(part.get("items"))
            if part.get("type") == "array" and "maxItems" not in part and "$ref" in items:
                unbounded.add(items)
            for inner in part.values():
                walk(inner)
        elif isinstance(part, list):
            for inner in part:
                walk(inner)

    walk(model.model_json_schema())
    assert unbounded <= {'{"$ref": "#/$defs/TextPart"}'}


def test_bodies_are_read_without_garbage_collection(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two megabytes of empty lists took 0.4 s, of which the collector took nine tenths."""
    states: list[bool] = []

    def record(body: bytes, **options: Any) -> Any:
        states.append(gc.isenabled())
        return json.loads(body, **options)

    class Recording:
        loads = staticmethod(record)

    monkeypatch.setattr(middleware, "json", Recording)

    async def scenario() -> None:
        async with serve() as server:
            for content, status in ((b'{"prompt": "a", "max_tokens": 1}', 200), (b"{", 400), (b"[" * 100_000, 400)):
                headers = {"content-type": "application/json"}
                reply = await server.http.post("/v1/completions", content=content, headers=headers)
                assert reply.status_code == status, reply.text
                assert gc.isenabled()

    asyncio.run(scenario())
    assert states == [False] * 3
