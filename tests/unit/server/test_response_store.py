"""Stored responses: conversations are continued by `previous_response_id`, within bounds and for one client only."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specray.server.errors import ApiError
from specray.server.responses.items import MessageItem
from specray.server.responses.store import ResponseStore
from tests.support.scripted_server import Serve, Server
from tests.unit.server.in_process_clients import answer_with

KEYS = {"one": "0123456789abcdef0123", "two": "0123456789abcdef0124"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(autouse=True)
def _template(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)


async def ask(server: Server, **body: Any) -> dict[str, Any]:
    reply = await server.http.post("/v1/responses", json={"max_output_tokens": 60} | body)
    assert reply.status_code == 200, reply.text
    fields: dict[str, Any] = reply.json()
    return fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "echoed",
    [
        b'"metadata": {"\\ud800": "\\ud800"}',
        b'"tools": [{"type": "function", "name": "f", "parameters": {"title": "\\ud800"}}], "tool_choice": "none"',
        b'"tools": [{"type": "function", "name": "f", "parameters": {"default": NaN}}], "tool_choice": "none"',
        b'"tools": [{"type": "function", "name": "f", "parameters": {"default": 1e999}}], "tool_choice": "none"',
    ],
)
def test_what_a_reply_would_repeat_of_its_request_does_not_end_it(serve: Serve, echoed: bytes, stream: bool) -> None:
    body = b'{"input": "x", "max_output_tokens": 2, "stream": %s, %s}' % (str(stream).lower().encode(), echoed)

    async def scenario() -> None:
        async with serve(server={"response_store_mib": 1}) as server:
            reply = await server.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
            if b"ud800" in echoed:
                assert '"incomplete"' in reply.text, reply.text
            else:
                assert (reply.status_code, "which is not finite" in reply.text) == (400, True), reply.text

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_continued(serve: Serve, tokenizer: PreTrainedTokenizerFast, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(server={"response_store_mib": 1}) as server:
            answer_with(server, tokenizer, "Yes.")
            body = {"input": "Is snow cold?", "instructions": "Be brief.", "stream": stream}
            reply = await server.http.post("/v1/responses", json=body)
            first_id = next(part[:37] for part in reply.text.split('"id":"') if part.startswith("resp_"))
            second = await ask(server, input="Why?", previous_response_id=first_id)
            whole = [{"role": "user", "content": "Is snow cold?"}, {"role": "assistant", "content": "Yes."}]
            same = await ask(server, input=[*whole, {"role": "user", "content": "Why?"}])
            assert second["usage"]["input_tokens"] == same["usage"]["input_tokens"]
            assert (second["previous_response_id"], second["store"]) == (first_id, True)
            third = await ask(server, previous_response_id=second["id"], instructions="Be kind.")
            prompt = "[system]Be kind.[user]Is snow cold?[assistant]Yes.[user]Why?[assistant]Yes."
            assert third["usage"]["input_tokens"] == len(tokenizer.encode(prompt))
            counted = await server.http.post(
                "/v1/responses/input_tokens", json={"previous_response_id": second["id"], "instructions": "Be kind."}
            )
            assert counted.json()["input_tokens"] == third["usage"]["input_tokens"]

    asyncio.run(scenario())


def test_a_call_and_its_result_are_continued(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario() -> None:
        async with serve(server={"response_store_mib": 1}) as server:
            answer_with(server, tokenizer, CALL)
            first = await ask(server, input="Go", tools=[{"type": "function", "name": "f"}])
            [call] = first["output"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
            second = await ask(server, input=[result], previous_response_id=first["id"])
            expected = '[user]Go[assistant]<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
            prompt = f"{expected}[user]<tool_response>\ndone\n</tool_response>"
            assert second["usage"]["input_tokens"] == len(tokenizer.encode(prompt))

    asyncio.run(scenario())


def test_a_stored_response_can_be_read_and_deleted(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(server={"response_store_mib": 1}) as server:
            first = await ask(server, input="Hi")
            path = f"/v1/responses/{first['id']}"
            assert (await server.http.get(path)).json() == first
            assert (await server.http.delete(path)).json()["deleted"] is True
            assert (await server.http.get(path)).status_code == 404
            unstored = await ask(server, input="Hi", store=False)
            assert unstored["store"] is False
            assert (await server.http.get(f"/v1/responses/{unstored['id']}")).status_code == 404

    asyncio.run(scenario())


@pytest.mark.parametrize(("mib", "reason"), [(0, "server.response_store_mib"), (1, "another ingress replica")])
def test_an_unknown_response_is_not_found(serve: Serve, mib: int, reason: str) -> None:
    async def scenario() -> None:
        async with serve(server={"response_store_mib": mib}) as server:
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                reply = await server.http.post(path, json={"input": "Hi", "previous_response_id": "resp_x"})
                assert reply.status_code == 404
                error = reply.json()["error"]
                assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
                assert reason in error["message"]

    asyncio.run(scenario())


def test_compaction_is_not_found(serve: Serve) -> None:
    """A 405 would say that the route exists; clients look for a 404."""

    async def scenario() -> None:
        async with serve() as server:
            reply = await server.http.post("/v1/responses/compact", json={"input": "hi"})
            assert reply.status_code == 404
            assert "compact" in reply.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_response_is_known_to_its_own_client_only(serve: Serve, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "keys"
        path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        path.chmod(0o600)
        async with serve(server={"response_store_mib": 1, "api_key_file": str(path)}) as server:
            one, two = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
            body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 20}
            first = (await server.http.post("/v1/responses", json=body, headers=one)).json()
            body |= {"previous_response_id": first["id"]}
            assert (await server.http.post("/v1/responses", json=body, headers=two)).status_code == 404
            assert (await server.http.post("/v1/responses", json=body, headers=one)).status_code == 200

    asyncio.run(scenario())


def test_the_client_that_takes_most_loses_its_oldest_response() -> None:
    store = ResponseStore(3000)
    item = MessageItem(role="user", content="x" * 500)
    for tenant, name in (("a", "a1"), ("b", "b1"), ("b", "b2"), ("b", "b3"), ("b", "b4")):
        store.add(tenant, {"id": name, "output": []}, [item])
        if name == "b3":
            store.get("b", "b1")
    store.add("b", {"id": "b5", "output": []}, [item])
    assert store.get("a", "a1").items == [item]
    with pytest.raises(ApiError, match="dropped for newer ones"):
        store.get("b", "b2")
    assert store.get("b", "b1").items == [item]


def test_a_response_larger_than_the_store_is_dropped() -> None:
    store = ResponseStore(100)
    store.add("a", {"id": "a1", "output": []}, [MessageItem(role="user", content="x" * 500)])
    with pytest.raises(ApiError, match="a1"):
        store.get("a", "a1")
