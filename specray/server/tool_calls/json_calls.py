"""A call written as one JSON object, such as `{"name": "f", "arguments": {"x": 1}}`."""

from specray.server.model_output.reader import NotACallError, Reader, Reading, ignore
from specray.server.tool_calls.calls import CallSink
from specray.server.tool_calls.json_text import copy_value, read_object, read_string

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
            yield from (copy_value(reader, ignore) if call.has_arguments else read_object(reader, call.arguments))
        else:
            yield from copy_value(reader, ignore)
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            call.close()
            return
        yield from reader.expect(",")


def scan_named(reader: Reader, sink: CallSink, name: str) -> Reading[None]:
    """Read the arguments of a call whose name was read already."""
    call = _ObjectCall(sink)
    call.name(name)
    yield from reader.skip_space()
    yield from read_object(reader, call.arguments)


class _ObjectCall:
    """One call: it starts when its name and the first of its arguments are known."""

    def __init__(self, sink: CallSink) -> None:
        self.has_arguments = False
        self._sink = sink
        self._name: str | None = None
        self._waiting: list[str] = []  # arguments that came before the name

    def name(self, name: str) -> None:
        """The first name counts."""
        if self._name is None:
            self._sink.check(name)
            self._name = name
            if self.has_arguments:
                self._sink.start(name)
                self._sink.arguments("".join(self._waiting))

    def arguments(self, text: str) -> None:
        if self._name is None:
            self._waiting.append(text)
        else:
            if not self.has_arguments:
                self._sink.start(self._name)
            self._sink.arguments(text)
        self.has_arguments = True

    def close(self) -> None:
        if self._name is None:
            raise NotACallError
        if not self.has_arguments:
            self.arguments(NO_ARGUMENTS)
