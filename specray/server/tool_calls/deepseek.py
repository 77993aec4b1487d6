"""DeepSeek V3, R1 and V3.1: calls between markers, the arguments in a block of JSON or, since V3.1, bare."""

from specray.server.model_output.reader import NotACallError, Reader, Reading
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import scan_named

_BAR = "\uff5c"  # a full-width vertical line
CALLS_BEGIN = f"<{_BAR}tool▁calls▁begin{_BAR}>"
CALLS_END = f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL_BEGIN = f"<{_BAR}tool▁call▁begin{_BAR}>"
CALL_END = f"<{_BAR}tool▁call▁end{_BAR}>"
SEPARATOR = f"<{_BAR}tool▁sep{_BAR}>"
TYPE = "function"  # of a call, before the separator in the older format
BLOCK = "```json"
BLOCK_END = "```"


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    while opening := (yield from reader.through((CALLS_BEGIN, CALL_BEGIN), sink.content)):
        if opening == CALLS_BEGIN and (yield from reader.accept(CALL_BEGIN)):
            opening += CALL_BEGIN
        if not opening.endswith(CALL_BEGIN):
            sink.content(opening)
        elif (yield from read_call(reader, sink, opening, _scan_call)):
            yield from reader.skip_space()
            yield from reader.skip(CALLS_END)


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    head: list[str] = []
    if (yield from reader.through((SEPARATOR,), head.append)) is None:
        raise NotACallError
    if "".join(head).strip() == TYPE and (yield from reader.peek()) != "{":
        yield from _scan_block(reader, sink)
    else:
        yield from scan_named(reader, sink, "".join(head).strip())
    yield from reader.skip_space()
    yield from reader.skip(CALL_END)


def _scan_block(reader: Reader, sink: CallSink) -> Reading[None]:
    name: list[str] = []
    if (yield from reader.through((BLOCK,), name.append)) is None:
        raise NotACallError
    yield from scan_named(reader, sink, "".join(name).strip())
    yield from reader.skip_space()
    yield from reader.skip(BLOCK_END)
