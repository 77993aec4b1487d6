"""Makes times comparable between light and heavy load.

A request's share of a step takes less time in a large batch. A drafter that happened to be used in large batches would
look fast. Times are therefore measured in units of what a token usually takes in batches of that size.
"""

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
