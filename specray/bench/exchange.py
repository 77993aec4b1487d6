"""One HTTP/1.1 exchange on its own connection, which can be cut at any byte or read slowly.

Ordinary HTTP clients cannot disconnect in the middle of a header.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

READ_BYTES = 65536
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A reply, as far as it was received."""

    seconds: float  # time from connecting to the end
    status: int | None = None  # None: no status line arrived
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""  # the content, chunk framing removed
    is_whole: bool = False
    was_cut: bool = False  # whether we cut it
    error: str = ""  # the error that ended the connection
    was_connected: bool = True
    longest_gap: float = 0.0  # seconds between two pieces of the reply
    event_times: tuple[float, ...] = ()  # a stream's: seconds from connecting until each event had arrived


def request_bytes(url: str, body: Any = None, key: str | None = None) -> bytes:
    """A POST of `body` as JSON, or a GET without one."""
    parts = urlsplit(url)
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {parts.path or '/'} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Connection: close",
        *([f"Authorization: Bearer {key}"] if key else []),
        *(["Content-Type: application/json", f"Content-Length: {len(content)}"] if content else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def exchange(
    url: str, request: bytes, timeout_s: float = 600.0, cut_at: int | None = None, read_bytes_per_s: float | None = None
) -> Exchange:
    """Send `request` to the host of `url` and read the reply to its end.

    `cut_at`: disconnect after this many bytes, sent and received together; a reply that ends earlier is complete.
    A reply read at `read_bytes_per_s` that takes longer than `timeout_s` counts as cut. Network and server errors are
    returned and not raised.
    """
    reply = _Reply(time.perf_counter())
    was_cut, error = False, ""
    try:
        async with asyncio.timeout(timeout_s):
            was_cut = await _converse(url, request, reply, cut_at, read_bytes_per_s)
    except TimeoutError:
        was_cut = read_bytes_per_s is not None  # a reader this slow does not wait for the end
        error = f"no end within {timeout_s:g} s"
    except (OSError, h11.RemoteProtocolError) as problem:
        error = str(problem)
    return Exchange(
        seconds=reply.elapsed_s,
        status=reply.status,
        headers=reply.headers,
        body=bytes(reply.body),
        is_whole=reply.is_whole,
        was_cut=was_cut and not reply.is_whole,
        error=error,
        was_connected=reply.was_connected,
        longest_gap=reply.longest_gap,
        event_times=tuple(reply.event_times),
    )


class _Reply:
    """The part of a reply received so far, and when its pieces and events came."""

    def __init__(self, start: float) -> None:
        self.was_connected = False
        self.num_bytes = 0  # with the head and chunk framing
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_whole = False
        self.longest_gap = 0.0
        self.event_times: list[float] = []
        self._start, self._last = start, 0.0
        self._events_end = 0  # of the last whole event in `body`
        self._parser = h11.Connection(h11.CLIENT)
        for event in (h11.Request(method="GET", target="/", headers=[("Host", "")]), h11.EndOfMessage()):
            self._parser.send(event)  # the parser reads a reply to something; the request itself was sent as bytes

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def add(self, data: bytes) -> None:
        """Read a piece; an empty one is the end of the connection. h11.RemoteProtocolError if it is no HTTP."""
        now = self.elapsed_s
        if self.num_bytes and data:
            self.longest_gap = max(self.longest_gap, now - self._last)
        self._last = now
        self.num_bytes += len(data)
        self._parser.receive_data(data)
        while not self.is_whole and (event := self._parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                self.body += event.data
            self.is_whole = isinstance(event, h11.EndOfMessage)
        if self.headers.get("content-type", "").startswith(EVENT_STREAM):
            while (found := self.body.find(EVENT_END, self._events_end)) >= 0:
                self._events_end = found + len(EVENT_END)
                self.event_times.append(now)


async def _converse(
    url: str, request: bytes, reply: _Reply, cut_at: int | None, read_bytes_per_s: float | None
) -> bool:
    """True if the connection was cut before the reply's end."""
    parts = urlsplit(url)
    with_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if with_tls else 80), ssl=with_tls or None
    )
    reply.was_connected = True
    try:
        writer.write(request[:cut_at])
        await writer.drain()
        if cut_at is not None and cut_at < len(request):
            return True
        most = None if cut_at is None else cut_at - len(request)
        while most is None or reply.num_bytes < most:
            data = await reader.read(_piece(most, reply.num_bytes, read_bytes_per_s))
            reply.add(data)
            if not data or reply.is_whole:
                return False
            if read_bytes_per_s is not None:
                await asyncio.sleep(len(data) / read_bytes_per_s)
        return True
    finally:
        writer.transport.abort()


def _piece(most: int | None, num_received: int, read_bytes_per_s: float | None) -> int:
    size = READ_BYTES if read_bytes_per_s is None else max(1, int(read_bytes_per_s / 10))
    return size if most is None else min(size, most - num_received)
