"""How requests ended, as their clients saw it. Every request has exactly one ending.

`specray.bench.ledger` classifies what a client can see; here the expected text is known too.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import NamedTuple

from specray.bench import ledger
from specray.bench.exchange import Exchange
from specray.bench.ledger import Outcome

REQUEST_TIMEOUT_S = 90.0  # a request that has not ended by then is lost
SHOWN_BYTES = 400  # of the body of a request that was not answered


class Ending(StrEnum):
    """How a request ended. The last two must never happen."""

    COMPLETE = "complete"  # the tokens of plain decoding, and a proper end
    REFUSED = "refused"  # 429 or 503 before the first token, or no connection
    FAILED = "failed"  # an error in the body or in an event
    CUT = "cut"  # the connection was closed early
    LEFT = "left"  # the client disconnected
    WRONG = "wrong"  # another text
    LOST = "lost"  # a clean end without an answer, or no end


def ending_of(reply: Exchange, text: str) -> Ending:
    """The ending of a request whose expected answer is `text`."""
    seen = ledger.ending_of(reply)
    match seen.outcome:
        case Outcome.COMPLETE:
            return Ending.COMPLETE if seen.text == text else Ending.WRONG
        case Outcome.REFUSED:
            return Ending.REFUSED
        case Outcome.ABORTED:
            return Ending.LEFT
        case Outcome.ERROR:
            return Ending.REFUSED if seen.status in ledger.REFUSALS else Ending.FAILED
        case Outcome.BROKEN:
            if not reply.was_connected:
                return Ending.REFUSED
            return Ending.LOST if reply.is_whole or reply.seconds >= REQUEST_TIMEOUT_S else Ending.CUT


class Unanswered(NamedTuple):
    """A request without a complete answer: what its client saw, and when, in seconds since the fault was injected."""

    ending: Ending
    sent_s: float
    ended_s: float
    injection: int  # the number of the fault, from 1; 0 before the first
    status: int | None
    retry_after: str | None
    detail: str  # the body's end, or the error that ended the connection

    def __str__(self) -> str:
        when = f"sent {self.sent_s:.2f} s after injection {self.injection}, ended at {self.ended_s:.2f} s"
        return f"{self.ending}: {when}, status {self.status}, Retry-After {self.retry_after}: {self.detail}"


@dataclass(slots=True)
class Ledger:
    """Endings of the requests during one fault, and the longest gap in each stream, in seconds."""

    endings: Counter[Ending] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    unanswered: list[Unanswered] = field(default_factory=list)
    num_injections: int = 0
    injected_at: float = field(default_factory=time.monotonic)

    def begin_injection(self) -> None:
        self.num_injections += 1
        self.injected_at = time.monotonic()

    def enter(self, ending: Ending, reply: Exchange) -> None:
        """Record a request that has ended now."""
        self.endings[ending] += 1
        self.gaps.append(reply.longest_gap)
        if ending is not Ending.COMPLETE:
            self.unanswered.append(self._unanswered(ending, reply))

    def unexpected(self, allowed: Sequence[Ending]) -> list[Unanswered]:
        """Requests with other endings than these."""
        return [request for request in self.unanswered if request.ending not in allowed]

    def _unanswered(self, ending: Ending, reply: Exchange) -> Unanswered:
        ended_s = time.monotonic() - self.injected_at
        detail = reply.error or reply.body[-SHOWN_BYTES:].decode(errors="replace").strip()
        retry_after = reply.headers.get("retry-after")
        sent_s = ended_s - reply.seconds
        return Unanswered(ending, sent_s, ended_s, self.num_injections, reply.status, retry_after, detail)

    def beyond(self, allowed: Sequence[Ending]) -> dict[Ending, int]:
        """Counts of endings that are not allowed."""
        return {ending: count for ending, count in self.endings.items() if ending not in allowed}


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is not exceeded by `share` of all; None without values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None
