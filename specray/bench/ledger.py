"""The outcome of every request of a load, as its client sees it.

Each request ends in exactly one way. A reply that is not one of the valid outcomes, such as a stream that stops in the
middle, is `broken`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specray.bench.exchange import EVENT_STREAM, Exchange

DONE = "[DONE]"
REFUSALS = (429, 503)
TOKEN_FIELDS = ("text", "content", "reasoning_content", "reasoning", "tool_calls")  # of a choice or its delta


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    ERROR = "error"  # an error body, or an error event in its stream
    REFUSED = "refused"  # refused, with a Retry-After
    ABORTED = "aborted"  # the client left
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Ending:
    """A request's end."""

    outcome: Outcome
    status: int | None  # HTTP status; None if none arrived
    seconds: float  # time since it was sent
    num_tokens: int = 0  # the server's count; 0 unless complete
    text: str = ""  # the first choice's, as far as it was received
    detail: str = ""  # the error message, or what was wrong with a broken reply
    token_times: tuple[float, ...] = ()  # a stream's: seconds until each event with tokens arrived
    sent_s: float = 0.0  # when it was sent: seconds since the load began


class Ledger:
    """The requests that were sent, and how each ended."""

    def __init__(self) -> None:
        self.endings: dict[str, Ending] = {}
        self._open: set[str] = set()

    def begin(self, request_id: str) -> None:
        if request_id in self._open or request_id in self.endings:
            raise ValueError(f"request {request_id!r} was already sent")
        self._open.add(request_id)

    def end(self, request_id: str, ending: Ending) -> None:
        """ValueError if the request was not sent or has ended before."""
        if request_id not in self._open:
            raise ValueError(f"request {request_id!r} ended as {ending.outcome}, but it is not open")
        self._open.remove(request_id)
        self.endings[request_id] = ending

    @property
    def num_begun(self) -> int:
        return len(self._open) + len(self.endings)

    def count(self, outcome: Outcome) -> int:
        return len(self.of(outcome))

    def of(self, outcome: Outcome) -> list[Ending]:
        return [ending for ending in self.endings.values() if ending.outcome is outcome]

    def statuses(self) -> Counter[int | None]:
        return Counter(ending.status for ending in self.endings.values())

    def violations(self) -> list[str]:
        """Requests without an ending or with a broken one; empty if all went well."""
        broken = [(name, end) for name, end in self.endings.items() if end.outcome is Outcome.BROKEN]
        return [f"{name}: {end.detail}" for name, end in broken] + [f"{name}: no end" for name in sorted(self._open)]


def ending_of(exchange: Exchange) -> Ending:
    """The ending of one HTTP exchange."""
    outcome, num_tokens, text, detail = _classify(exchange)
    times = _token_times(exchange) if outcome is Outcome.COMPLETE else ()
    return Ending(outcome, exchange.status, exchange.seconds, num_tokens, text, detail, times)


def _token_times(exchange: Exchange) -> tuple[float, ...]:
    pairs = zip(_events(exchange.body), exchange.event_times, strict=False)  # none of a reply in one piece
    return tuple(at for event, at in pairs if event != DONE and _has_tokens(json.loads(event)))


def _has_tokens(event: Any) -> bool:
    parts = [choice | (choice.get("delta") or {}) for choice in event.get("choices", [])]
    return any(part.get(name) for part in parts for name in TOKEN_FIELDS)


def _events(body: bytes) -> list[str]:
    return [event.removeprefix("data: ") for event in body.decode(errors="replace").split("\n\n") if event]


def _classify(exchange: Exchange) -> tuple[Outcome, int, str, str]:
    """(outcome, tokens, text, detail)."""
    if exchange.was_cut:
        return Outcome.ABORTED, 0, "", ""
    if not exchange.was_connected:
        return Outcome.BROKEN, 0, "", f"no connection: {exchange.error}"
    if exchange.status is None or not exchange.is_whole:
        return Outcome.BROKEN, 0, "", f"the connection ended within the reply: {exchange.error or 'no error'}"
    if exchange.headers.get("content-type", "").startswith(EVENT_STREAM):
        return _classify_stream(exchange.body)
    try:
        body = json.loads(exchange.body)
    except ValueError:
        return Outcome.BROKEN, 0, "", f"status {exchange.status} with a body that is not JSON"
    if exchange.status == 200:
        return Outcome.COMPLETE, body["usage"]["completion_tokens"], _text([body]), ""
    if "error" not in body:
        return Outcome.BROKEN, 0, "", f"status {exchange.status} without an error object"
    is_refusal = exchange.status in REFUSALS and "retry-after" in exchange.headers
    return (Outcome.REFUSED if is_refusal else Outcome.ERROR), 0, "", str(body["error"].get("message"))


def _classify_stream(body: bytes) -> tuple[Outcome, int, str, str]:
    lines = _events(body)
    try:
        events = [json.loads(line) for line in lines if line != DONE]
    except ValueError:
        return Outcome.BROKEN, 0, "", "the stream has an event that is not JSON"
    if lines and lines[-1] == DONE:
        usages = [event["usage"] for event in events if event.get("usage")]
        return Outcome.COMPLETE, usages[-1]["completion_tokens"] if usages else 0, _text(events), ""
    if events and "error" in events[-1]:
        return Outcome.ERROR, 0, _text(events), str(events[-1]["error"].get("message"))
    return Outcome.BROKEN, 0, _text(events), "the stream stopped without [DONE] or an error"


def _text(bodies: Sequence[Any]) -> str:
    choices = [choice for body in bodies for choice in body.get("choices", []) if choice["index"] == 0]
    return "".join(_piece(choice) for choice in choices)


def _piece(choice: Any) -> str:
    piece = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
    return piece or ""
