"""Server-sent events: how the chunks of a reply are written, ended and, after a failure, reported."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from specray.server.errors import ApiError

Json = dict[str, Any]


class Framing(NamedTuple):
    """The events of one API dialect."""

    encode: Callable[[Json], bytes]  # one chunk
    done: bytes  # after the last chunk of a complete reply
    error: Callable[[ApiError], list[Json]]  # the chunks that end a failed reply


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def data_event(chunk: Json) -> bytes:
    """An event without a name."""
    return b"data: " + dumps(chunk) + b"\n\n"


def named_event(chunk: Json) -> bytes:
    """An event named by the chunk's type."""
    return f"event: {chunk['type']}\n".encode() + data_event(chunk)


OPENAI_FRAMING = Framing(data_event, b"data: [DONE]\n\n", lambda error: [error.body])
