"""Each request has one ending, and a reply without a valid ending is broken."""

import json
from typing import Any

import pytest

from specray.bench.exchange import Exchange
from specray.bench.ledger import Ending, Ledger, Outcome, ending_of

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
ERROR = {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}
CHUNK = {"choices": [{"index": 0, "text": "ab"}], "usage": None}
LAST = {"choices": [], "usage": {"completion_tokens": 3}}


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def whole(status: int, body: Any, **headers: str) -> Exchange:
    return Exchange(0.5, status, JSON | headers, json.dumps(body).encode(), True)


@pytest.mark.parametrize(
    ("exchange", "outcome"),
    [
        (whole(200, LAST | {"choices": CHUNK["choices"]}), Outcome.COMPLETE),
        (Exchange(1.0, 200, EVENTS, stream(CHUNK, LAST, b"[DONE]"), True), Outcome.COMPLETE),
        (Exchange(1.0, 200, EVENTS, stream(CHUNK, ERROR), True), Outcome.ERROR),
        (whole(504, ERROR), Outcome.ERROR),
        (whole(429, ERROR, **{"retry-after": "1"}), Outcome.REFUSED),
        (whole(503, ERROR, **{"retry-after": "2"}), Outcome.REFUSED),
        (whole(429, ERROR), Outcome.ERROR),
        (Exchange(1.0, 200, EVENTS, b"", False, was_cut=True), Outcome.ABORTED),
        (Exchange(1.0, 200, EVENTS, stream(CHUNK), True), Outcome.BROKEN),
        (Exchange(1.0, 200, EVENTS, stream(CHUNK, b"{"), True), Outcome.BROKEN),
        (Exchange(1.0, 200, EVENTS, stream(CHUNK, b"[DONE]"), False), Outcome.BROKEN),
        (Exchange(1.0, 503, {"content-type": "text/plain"}, b"busy", True), Outcome.BROKEN),
        (Exchange(1.0, error="connection reset"), Outcome.BROKEN),
    ],
)
def test_a_reply_is_read_as_one_outcome(exchange: Exchange, outcome: Outcome) -> None:
    ending = ending_of(exchange)
    assert ending.outcome is outcome
    assert ending.num_tokens == (3 if outcome is Outcome.COMPLETE else 0)
    assert (outcome is Outcome.BROKEN) <= bool(ending.detail)


def test_the_text_of_a_stream_is_joined() -> None:
    delta = {"choices": [{"index": 0, "delta": {"content": "c"}}, {"index": 1, "delta": {"content": "other"}}]}
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    assert ending_of(Exchange(1.0, 200, EVENTS, stream(opening, CHUNK, delta, b"[DONE]"), True)).text == "abc"


def test_a_request_ends_once_and_open_requests_are_violations() -> None:
    ledger, end = Ledger(), Ending(Outcome.COMPLETE, 200, 1.0)
    for name in "abc":
        ledger.begin(name)
    ledger.end("a", end)
    ledger.end("b", Ending(Outcome.BROKEN, None, 1.0, detail="reset"))
    assert ledger.num_begun == 3
    assert ledger.violations() == ["b: reset", "c: no end"]
    for again in (lambda: ledger.end("a", end), lambda: ledger.end("x", end), lambda: ledger.begin("a")):
        with pytest.raises(ValueError, match=r"'[ax]'"):
            again()
