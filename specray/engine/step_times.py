"""Measured seconds per generated token by batch size, and the speed-up of steps with drafts over plain steps.

An engine runs plain steps among the others: on CPUs `budget: auto` tries them, elsewhere `speculative.plain_share`
asks for them. They give the time of a plain step by batch size, so the speed-up, a ratio of two counters, is measured
and not estimated from a cost model.
"""

from specray.engine.stats import EngineStats

DRAFTED, PLAIN = "specray_drafted_seconds_total", "specray_drafted_plain_seconds_total"
_MEMORY_STEPS = 512
_CLIP = 3.0  # a step that takes longer than this many times the usual was disturbed, and counts as this


def size_class(num_requests: int) -> int:
    """The class of a batch's size: 1, 2, 3 to 4, 5 to 8, … requests."""
    return (num_requests - 1).bit_length()


class UsualTimes:
    """Seconds that a generated token usually takes, by size of the batch."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def observe(self, num_requests: int, num_generated: int, seconds: float) -> None:
        """Count a step that only decoded, and generated `num_generated` tokens in `seconds`."""
        size, token_seconds = size_class(num_requests), max(seconds, 1e-9) / num_generated
        steps = self._steps[size] = min(_MEMORY_STEPS, self._steps.get(size, 0) + 1)
        usual = self._seconds.setdefault(size, token_seconds)
        self._seconds[size] = usual + (min(token_seconds, _CLIP * usual) - usual) / steps

    def of(self, num_requests: int) -> float | None:
        """The usual seconds of a token; None until steps of this size were observed."""
        return self._seconds.get(size_class(num_requests))


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
