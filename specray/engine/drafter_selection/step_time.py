"""What a request's part of a step took, in units that can be compared between drafters.

A request's share of a step takes less time in a large batch. A drafter that happened to be used in large batches would
look fast. Times are therefore measured in units of what a token usually takes in batches of that size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specray.engine.draft_budget.costs import size_class

MEMORY_STEPS = 512
CLIP = 3.0  # a step that takes longer than this many times the usual was disturbed, and counts as this


class UsualTimes:
    """Seconds that a generated token usually takes, by size of the batch, over all drafters."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def observe(self, num_requests: int, num_generated: int, seconds: float) -> None:
        """Count a step that only decoded, and generated `num_generated` tokens in `seconds`."""
        size, token_seconds = size_class(num_requests), max(seconds, 1e-9) / num_generated
        steps = self._steps[size] = min(MEMORY_STEPS, self._steps.get(size, 0) + 1)
        usual = self._seconds.setdefault(size, token_seconds)
        self._seconds[size] = usual + (min(token_seconds, CLIP * usual) - usual) / steps

    def of(self, num_requests: int) -> float | None:
        """The usual seconds of a token; None until steps of this size were observed."""
        return self._seconds.get(size_class(num_requests))


class StepRow(NamedTuple):
    """One request's part of a step."""

    drafter: str
    num_tokens: int  # computed by the target: known tokens and drafts


def step_shares(rows: Sequence[StepRow], seconds: float, draft_seconds: Mapping[str, float]) -> list[float]:
    """Seconds of each row: those of its drafter, shared by the drafter's rows, and of the rest by tokens computed.

    `draft_seconds` are those of each drafter for its rows, and part of the step's `seconds`. Where a drafter runs in
    its own process they overlap with the host's work; the rest is then counted as shorter for all drafters.
    """
    counts = Counter(row.drafter for row in rows)
    rest = max(0.0, seconds - sum(draft_seconds.get(name, 0.0) for name in counts))
    num_tokens = max(1, sum(row.num_tokens for row in rows))
    return [
        rest * row.num_tokens / num_tokens + draft_seconds.get(row.drafter, 0.0) / counts[row.drafter] for row in rows
    ]
