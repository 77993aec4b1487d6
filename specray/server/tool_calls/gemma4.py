"""Gemma 4: `<|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3}<tool_call|>`, one call after the other.

Keys have no quotes, and strings are between marks, without escapes. Source: Google's description of Gemma 4's prompts,
and vLLM's parser of this name. A grammar forces calls whose arguments are JSON, which is read, too.
"""

import re

from specray.server.model_output.reader import NotACallError, Reader, Reading, ignore
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import scan_named

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
CALL = "call:"
_NAME = re.compile(r"[\w.-]*")


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    marker = yield from reader.through((OPEN,), sink.content)
    while marker is not None:
        num_calls = sink.num_calls
        is_complete = yield from read_call(reader, sink, OPEN, _scan_call)
        if not is_complete and sink.num_calls > num_calls:  # the rest of a broken call is not content
            yield from reader.through((CLOSE,), ignore)
        marker = yield from reader.through((OPEN,), sink.content)


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    name: list[str] = []
    yield from reader.expect(CALL)
    yield from reader.run(_NAME, name.append)
    if (yield from reader.peek()) != "{":
        raise NotACallError
    yield from scan_named(reader, sink, "".join(name))
    yield from reader.skip_space()
    yield from reader.skip(CLOSE)
