"""One HTTP/1.1 exchange on its own connection, which can be cut at any byte or read slowly.

Ordinary HTTP clients cannot disconnect in the middle of a header.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 65536
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A reply, as far as it was received."""

    seconds: float  # from connecting to the end
    status: int | None = None  # None: no status line arrived
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""  # without chunk framing
    is_whole: bool = False
    was_cut: bool = False  # by us
    error: str = ""  # the error that ended the connection
    was_connected: bool = True
    longest_gap: float = 0.0  # seconds between two pieces of the reply
    event_times: tuple[float, ...] = ()  # of a stream: seconds from connecting until each event had arrived


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
    start = time.perf_counter()
    received = _Received(start)
    was_cut, error = False, ""
    try:
        async with asyncio.timeout(timeout_s):
            was_cut = await _converse(url, request, received, cut_at, read_bytes_per_s)
    except TimeoutError:
        was_cut = read_bytes_per_s is not None  # a reader this slow does not wait for the end
        error = f"no end within {timeout_s:g} s"
    except OSError as problem:
        error = str(problem)
    reply = _parsed(received, time.perf_counter() - start, was_cut, error)
    return replace(reply, was_connected=received.was_connected, longest_gap=received.longest_gap)


class _Received:
    """The part of a reply received so far, and when its pieces came."""

    def __init__(self, start: float) -> None:
        self.data = bytearray()
        self.was_connected = False
        self.longest_gap = 0.0
        self._start = start
        self._ends: list[int] = []  # of each piece in `data`
        self._times: list[float] = []  # seconds from the start

    def add(self, data: bytes) -> None:
        now = time.perf_counter() - self._start
        self.longest_gap = max(self.longest_gap, now - (self._times[-1] if self._times else now))
        self.data += data
        self._ends.append(len(self.data))
        self._times.append(now)

    def time_of(self, end: int) -> float:
        """Seconds from the start until the first `end` bytes had arrived."""
        return self._times[bisect_left(self._ends, end)]


async def _converse(
    url: str, request: bytes, received: _Received, cut_at: int | None, read_bytes_per_s: float | None
) -> bool:
    """True if the connection was cut before the reply's end."""
    parts = urlsplit(url)
    with_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if with_tls else 80), ssl=with_tls or None
    )
    received.was_connected = True
    try:
        writer.write(request[:cut_at])
        await writer.drain()
        if cut_at is not None and cut_at < len(request):
            return True
        most = None if cut_at is None else cut_at - len(request)
        while most is None or len(received.data) < most:
            data = await reader.read(_piece(most, len(received.data), read_bytes_per_s))
            if not data:
                return False
            received.add(data)
            if read_bytes_per_s is not None:
                await asyncio.sleep(len(data) / read_bytes_per_s)
        return True
    finally:
        writer.transport.abort()


def _piece(most: int | None, num_received: int, read_bytes_per_s: float | None) -> int:
    size = READ_BYTES if read_bytes_per_s is None else max(1, int(read_bytes_per_s / 10))
    return size if most is None else min(size, most - num_received)


def _parsed(received: _Received, seconds: float, was_cut: bool, error: str) -> Exchange:
    head, separator, rest = bytes(received.data).partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    words = status_line.split(" ")
    if not separator or len(words) < 2 or not words[1].isdecimal():
        return Exchange(seconds, was_cut=was_cut, error=error)
    pairs = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body, is_whole, chunks = _body(headers, rest)
    first = len(head) + len(separator)
    times = [received.time_of(first + _framed(end, chunks)) for end in _event_ends(headers, body)]
    was_cut = was_cut and not is_whole
    return Exchange(seconds, int(words[1]), headers, body, is_whole, was_cut, error, event_times=tuple(times))


Chunks = Sequence[tuple[int, int]]  # of each chunk: where it ends in the content, and in the bytes with framing


def _body(headers: Mapping[str, str], data: bytes) -> tuple[bytes, bool, Chunks]:
    """(content, whether it is complete, its chunks)."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _dechunked(data)
    length = headers.get("content-length")
    return data, length is None or len(data) == int(length), [(len(data), len(data))]


def _dechunked(data: bytes) -> tuple[bytes, bool, Chunks]:
    content, place = bytearray(), 0
    chunks: list[tuple[int, int]] = []
    while (line_end := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:line_end].split(b";")[0], 16)
        if size == 0:
            return bytes(content), True, chunks
        end = line_end + 2 + size
        content += data[line_end + 2 : end]
        chunks.append((len(content), min(end, len(data))))
        if len(data) < end + 2:
            break
        place = end + 2
    return bytes(content), False, chunks


def _event_ends(headers: Mapping[str, str], body: bytes) -> list[int]:
    """Where each whole event of a stream ends."""
    if not headers.get("content-type", "").startswith(EVENT_STREAM):
        return []
    ends, place = [], 0
    while (found := body.find(EVENT_END, place)) >= 0:
        place = found + len(EVENT_END)
        ends.append(place)
    return ends


def _framed(end: int, chunks: Chunks) -> int:
    """The place in the bytes with framing of a place in the content."""
    content_end, framed_end = chunks[bisect_left(chunks, (end, 0))]
    return framed_end - (content_end - end)
