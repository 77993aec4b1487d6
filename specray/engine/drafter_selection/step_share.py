"""Each request's share of a step's time, as a pure function."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


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
