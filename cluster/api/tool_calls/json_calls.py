"""A call written as one JSON object, such as `{"name": "f", "arguments": {"x": 1}}`."""

from cluster.api.model_output.reader import NotACallError, Reader, Reading
from cluster.api.tool_calls.calls import CallSink
from cluster.api.tool_calls.json_text import copy_value, read_string

NO_ARGUMENTS = "{}"
_ARGUMENT_KEYS = ("arguments", "parameters")


def scan_object(reader: Reader, sink: CallSink) -> Reading[None]:
    """Read one call. Its name may stand after its arguments; other keys are ignored."""
    call = _ObjectCall(sink)
    yield from reader.expect("{")
    while True:
        yield from reader.skip_space()
        key = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name":
            call.name((yield from read_string(reader)))
        elif key in _ARGUMENT_KEYS:
            yield from scan_arguments(reader, call)
        else:
            yield from copy_value(reader, _ignore)
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            call.close()
            return
        yield from reader.expect(",")


def scan_arguments(reader: Reader, sink: "CallSink | _ObjectCall") -> Reading[None]:
    """Read the arguments of a call: an object, its JSON text as a string, or null."""
    if (yield from reader.peek()) == '"':
        sink.arguments((yield from read_string(reader)))
    elif (yield from reader.accept("null")):
        sink.arguments(NO_ARGUMENTS)
    else:
        yield from copy_value(reader, sink.arguments)


class _ObjectCall:
    """One call: its arguments wait for its name. Keys that were seen before are ignored."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._is_started = False
        self._waiting: list[str] = []
        self._has_arguments = False

    def name(self, name: str) -> None:
        if not self._is_started:
            self._sink.start(name)
            self._is_started = True
            self._sink.arguments("".join(self._waiting))

    def arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._is_started:
            self._sink.arguments(text)
        else:
            self._waiting.append(text)

    def close(self) -> None:
        if not self._is_started:
            raise NotACallError
        if not self._has_arguments:
            self._sink.arguments(NO_ARGUMENTS)


def _ignore(text: str) -> None:
    pass
