"""The measured speed-up: what the steps with drafts took, and what plain steps would have taken for the same tokens.

An engine runs plain steps among the others: on CPUs `budget: auto` tries them, elsewhere `speculative.plain_share`
asks for them. They give the time of a plain step by batch size, so the ratio of the two counters is measured, not
estimated from a cost model.
"""

from specray.engine.drafter_selection.selector import UsualTimes
from specray.engine.stats import EngineStats

DRAFTED, PLAIN = "specray_drafted_seconds_total", "specray_drafted_plain_seconds_total"


class MeasuredSpeedup:
    """Counts steps that only decode, once plain steps with as many requests have been measured."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._plain = UsualTimes()

    def record(self, num_requests: int, num_generated: int, seconds: float, is_plain: bool) -> None:
        """See `StepTimer`."""
        if is_plain:
            self._plain.observe(num_requests, num_generated, seconds)
        elif (token_seconds := self._plain.of(num_requests)) is not None:
            self._stats.add(DRAFTED, seconds)
            self._stats.add(PLAIN, num_generated * token_seconds)
