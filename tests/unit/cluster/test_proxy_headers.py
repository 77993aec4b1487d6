"""Headers that Ray Serve's proxy cannot decode are refused with a clean error."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.proxy_headers import HeaderCheck, middlewares


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
    (middleware,) = middlewares()
    assert middleware.cls is HeaderCheck
