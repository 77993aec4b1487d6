"""gpt-oss: calls in messages of the harmony format, as `specray.server.model_output.channels` leaves them."""

from specray.server.model_output.channels import (
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    OPENING,
    RECIPIENT,
    START,
    recipient,
)
from specray.server.model_output.reader import NotACallError, Reader, Reading
from specray.server.tool_calls.calls import CallSink, read_call
from specray.server.tool_calls.json_calls import NO_ARGUMENTS, scan_named

BEGIN = f"{COMMENTARY}{RECIPIENT}{FUNCTIONS}{{name}} {CONSTRAIN}json{MESSAGE}"
SEPARATOR = CALL + OPENING


def scan(reader: Reader, sink: CallSink) -> Reading[None]:
    while opening := (yield from reader.through((START, CHANNEL), sink.content)):
        yield from read_call(reader, sink, opening, _scan_call)


def _scan_call(reader: Reader, sink: CallSink) -> Reading[None]:
    head: list[str] = []
    if (yield from reader.through((MESSAGE,), head.append)) is None:
        raise NotACallError
    name = recipient("".join(head)).removeprefix(FUNCTIONS)
    yield from reader.skip_space()
    text = yield from reader.peek(len(CALL))
    if text == CALL or not (text or reader.is_cut):
        sink.check(name)
        sink.start(name)
        sink.arguments(NO_ARGUMENTS)
    else:
        yield from scan_named(reader, sink, name)
    yield from reader.skip_space()
    yield from reader.skip(CALL)
