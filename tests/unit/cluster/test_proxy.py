"""Headers that Ray Serve's proxy cannot decode are refused with a clean error."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from httpx import Response
from ray.serve._private.http_util import convert_object_to_asgi_messages
from starlette.types import Message, Receive, Scope, Send

from cluster.proxy import HeaderCheck, ProxyErrors, middlewares


async def inner(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(*headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    scope = {"type": "http", "path": "/livez", "headers": list(headers)}
    asyncio.run(HeaderCheck(inner)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-id", b"\xff\xfe"),
        (b"traceparent", b"\xff"),
        (b"\xff", b"x"),
        (b"x-request-id", b"a" * 129),
        (b"X-Request-Id", "é".encode()),
        (b"x-request-id", b"a\tb"),
    ],
)
def test_headers_that_are_not_text_get_a_400(header: tuple[bytes, bytes]) -> None:
    status, body = ask((b"host", b"x"), header)
    assert status == 400
    assert body["error"]["code"] == "invalid_header"
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "header", [(b"x-request-id", b"0b7e-4"), (b"x-request-id", b""), (b"user-agent", "é".encode()), (b"cookie", b"")]
)
def test_other_headers_pass(header: tuple[bytes, bytes]) -> None:
    assert ask(header) == (200, {})


def test_serves_proxy_runs_the_check() -> None:
    assert [middleware.cls for middleware in middlewares()] == [HeaderCheck, ProxyErrors]


class Proxy:
    """Serve's proxy with these routes, and what an application answers."""

    def __init__(self, routes: dict[str, str], status: int = 404, content: object = "Path not found.") -> None:
        self._routes, self._status, self._content = routes, status, content

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        status, content = (200, self._routes) if scope["path"] == "/-/routes" else (self._status, self._content)
        for message in convert_object_to_asgi_messages(content, status):  # as the proxy writes its own
            await send(message)


def answer(proxy: Proxy, path: str = "/v1/completions") -> Response:
    async def scenario() -> Response:
        transport = httpx.ASGITransport(ProxyErrors(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, json={"stream": True})

    return asyncio.run(scenario())


def test_without_an_application_the_proxy_answers_503_instead_of_404() -> None:
    reply = answer(Proxy({}))
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "2"
    assert reply.json()["error"]["code"] == "service_unavailable"
    assert answer(Proxy({}), "/v1/messages").json()["error"]["type"] == "overloaded_error"


def test_a_path_of_no_application_is_a_404_in_the_apis_shape() -> None:
    reply = answer(Proxy({"/other": "other"}))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_other_plain_errors_of_the_proxy_have_the_apis_shape() -> None:
    reply = answer(Proxy({"/": "app"}, 500, "ActorDiedError: at 10.0.0.1"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "10.0.0.1" not in reply.text


@pytest.mark.parametrize(("status", "content"), [(404, {"error": {}}), (200, "text"), (429, {"error": {}})])
def test_what_an_application_answers_is_passed_on(status: int, content: object) -> None:
    reply = answer(Proxy({"/": "app"}, status, content))
    assert (reply.status_code, reply.text) == (status, content if status == 200 else '{"error":{}}')


def test_the_proxys_own_routes_are_passed_on() -> None:
    assert answer(Proxy({}, 503, "draining"), "/-/healthz").text == "draining"
