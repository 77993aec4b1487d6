"""How every request ended, as its client saw it: exactly one ending each, and nothing is left open.

Beside what any client can tell (`specray.bench.ledger`), the right text is known here. Not here: asking (`load`), what
breaks (`faults`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from specray.bench import ledger
from specray.bench.exchange import Exchange
from specray.bench.ledger import Outcome

PATIENCE_S = 90.0  # a request that has not ended by then never will


class Ending(StrEnum):
    """The ways in which a request can end. The last two must never happen."""

    COMPLETE = "complete"  # every token of plain decoding, once, and a proper end
    REFUSED = "refused"  # 429 or 503 before the first token, or no connection
    FAILED = "failed"  # an error that says so, in a body or an event
    CUT = "cut"  # the connection broke visibly
    LEFT = "left"  # its client went away
    WRONG = "wrong"  # another text: a token lost, repeated or made up
    LOST = "lost"  # a clean end without an answer, or no end at all


def ending_of(reply: Exchange, text: str) -> Ending:
    """The ending of a request whose right answer is `text`."""
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
            return Ending.LOST if reply.is_whole or reply.seconds >= PATIENCE_S else Ending.CUT


@dataclass(slots=True)
class Ledger:
    """Endings of the requests of one fault, and the longest silence within each stream, in seconds."""

    endings: Counter[Ending] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)

    def enter(self, ending: Ending, gap: float) -> None:
        self.endings[ending] += 1
        self.gaps.append(gap)

    def beyond(self, allowed: Sequence[Ending]) -> dict[Ending, int]:
        """Endings that this fault does not excuse."""
        return {ending: count for ending, count in self.endings.items() if ending not in allowed}


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of all do not exceed; None of nothing."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None
