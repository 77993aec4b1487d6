"""Mistral: `[TOOL_CALLS]` before an array of JSON objects, or before `name[ARGS]{...}` in newer models."""

import re

from specray.server.model_output.reader import Reader, Reading, ignore
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import scan_named, scan_object

MARKER = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_NAME = re.compile(r"[\w.-]*")


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    while (yield from reader.through((MARKER,), sink.content)):
        yield from reader.skip_space()
        if (yield from reader.accept("[")):
            yield from _scan_array(reader, sink)
        else:
            yield from read_call(reader, sink, MARKER, _scan_single)


def _scan_array(reader: Reader, sink: CallSink) -> Reading[None]:
    opening = MARKER + "["
    while (yield from read_call(reader, sink, opening, _scan_element)):
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.accept("]")
            return
        opening = ","


def _scan_element(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.skip_space()
    yield from scan_object(reader, sink)


def _scan_single(reader: Reader, sink: CallSink) -> Reading[None]:
    if (yield from reader.peek()) == "{":
        yield from scan_object(reader, sink)
    else:
        yield from _scan_named(reader, sink)


def _scan_named(reader: Reader, sink: CallSink) -> Reading[None]:
    name: list[str] = []
    yield from reader.run(_NAME, name.append)
    if (yield from reader.accept(CALL_ID)):
        yield from reader.run(_NAME, ignore)
    yield from reader.accept(ARGUMENTS)
    yield from scan_named(reader, sink, "".join(name))
