"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from specray.server.model_output.reader import Reader, Reading, ignore
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import scan_object

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    marker = yield from reader.through((OPEN,), sink.content)
    while marker is not None:
        num_calls = sink.num_calls
        is_complete = yield from read_call(reader, sink, OPEN, _scan_call)
        if is_complete or sink.num_calls == num_calls:
            marker = yield from reader.through((OPEN,), sink.content)
        else:  # the rest of a broken call is not content
            marker = yield from reader.through((OPEN, CLOSE), ignore)
            marker = marker if marker == OPEN else (yield from reader.through((OPEN,), sink.content))


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.skip_space()
    yield from scan_object(reader, sink)
    yield from reader.skip_space()
    yield from reader.skip(CLOSE)  # models leave it out at times
