"""What scanners of tool calls share: the sink that they write to, and giving text back that is not a call."""

from collections.abc import Callable, Collection
from functools import partial

from specray.server.model_output.events import CallArguments, CallStart, Content, Event, EventBuffer, Trimmer
from specray.server.model_output.reader import NotACallError, Reader, Reading


class CallSink:
    """Receives content and calls from a scanner. Whitespace beside calls is dropped."""

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str],
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> None:
        """`names` of the request's functions. Calls after the first `max_calls` are dropped.

        `is_forced`: a grammar makes the text consist of calls, so what is no call is the start of one that was cut.
        """
        self.num_calls = 0
        self._is_forced = is_forced
        self._names = names
        self._new_id = new_id
        self._max_calls = max_calls
        self._buffer = EventBuffer()
        self._content = Trimmer(keeps_leading=True)
        self._arguments: Callable[[str], Event] = Content

    def content(self, text: str) -> None:
        if self._is_forced:
            return
        self._buffer.text(Content, self._content.push(text))

    def check(self, name: str) -> None:
        """NotACallError if the request has no function of this name."""
        if name not in self._names:
            raise NotACallError

    def start(self, name: str) -> None:
        """Begin a call of a function whose name was checked."""
        number = self.num_calls
        self.num_calls += 1
        self._content = Trimmer()
        self._arguments = partial(CallArguments, number)
        if self._is_wanted:
            self._buffer.start(CallStart(number, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was started last."""
        if self._is_wanted:
            self._buffer.text(self._arguments, text)

    def take(self) -> list[Event]:
        return self._buffer.take()

    def finish(self) -> None:
        if not self.num_calls and not self._is_forced:
            self._buffer.text(Content, self._content.held())

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


Scan = Callable[[Reader, CallSink], Reading[None]]


def read_call(reader: Reader, sink: CallSink, opening: str, scan: Scan) -> Reading[bool]:
    """Read a call after `opening`, which was read already. False if what follows is not a complete call.

    If not even a function's name was found, the text becomes content, `opening` included.
    """
    num_calls = sink.num_calls
    reader.mark()
    try:
        yield from scan(reader, sink)
    except NotACallError:
        text = reader.marked()
        if sink.num_calls == num_calls:
            sink.content(opening + text)
        return False
    reader.marked()
    return True
