"""Llama 3: `{"name": ..., "parameters": ...}` as the whole message or after `<|python_tag|>`; several joined by `;`."""

import re

from specray.server.model_output.reader import Reader, Reading
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import scan_object

TAG = "<|python_tag|>"
SEPARATOR = ";"
_SPACE = re.compile(r"\s*")


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    space: list[str] = []
    yield from reader.run(_SPACE, space.append)
    opening: str | None = "".join(space)
    if (yield from reader.peek()) != "{":
        sink.content("".join(space))
        opening = yield from reader.through((TAG,), sink.content)
    if opening is not None:
        yield from scan_calls(reader, sink, opening)
    yield from reader.rest(sink.content)


def scan_calls(reader: Reader, sink: CallSink, opening: str) -> Reading[None]:
    """Read one call or several after `opening`, which was read already."""
    separator: str | None = opening
    while separator is not None and (yield from read_call(reader, sink, separator, _scan_call)):
        yield from reader.skip_space()
        separator = yield from _read_separator(reader)


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.skip_space()
    yield from scan_object(reader, sink)


def _read_separator(reader: Reader) -> Reading[str | None]:
    """What stands between two calls; None after the last one."""
    for separator in (SEPARATOR, TAG):
        if (yield from reader.accept(separator)):
            return separator
    return "" if (yield from reader.peek()) == "{" else None
