"""What a step costs, learnt from steps that only decode.

A step's time has two parts. The target's, forward and verification, depends on the number of tokens it computes. The
rest, drafting above all, depends on the number of requests and the size of their trees. Both have steps and bends that
differ from machine to machine, so they are tables and not formulas.

The speed of a whole machine also changes, with the load of other processes and with its clock rate. The tables hold
times divided by the current pace, which every step updates, so old and new measurements stay comparable.

Pace and tables have to learn from the same numbers. If a disturbed step counted more in a table than in the pace, the
pace would settle where the table still rises, and what is measured often would drift away from all else.
"""

from collections.abc import Iterable, Sequence
from math import exp, isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specray.engine.step_times import size_class

MEMORY = 64  # steps that an average remembers
HALF_LIFE = 512  # measurements of others after which an average counts half
PACE_MEMORY = 8  # the same for the pace; short beside MEMORY, so that a slower machine changes the pace and no table
CLIP = 1.5  # a step that takes longer than this many times what is expected was disturbed, and counts as this
STORED_SHARE = 1 / MEMORY  # of its weight that an average of an earlier start has: the machine may have been busy then
LEAST_WEIGHT = 1e-9  # of an average, however old: a mean of neighbours needs one
KNOWN_AFTER = 8  # measurements of a step that is seldom measured: one of the first may have been disturbed


class StepShape(NamedTuple):
    """What the costs depend on."""

    num_requests: int
    num_drafts: int  # sum over all requests
    most_drafts: int  # drafts of the largest tree; 0: the drafter is not called

    @property
    def num_tokens(self) -> int:
        return self.num_requests + self.num_drafts


class StepCosts:
    """Seconds of a step by its shape. Without any measurement every step costs the same."""

    def __init__(self) -> None:
        self._target = Curve()  # by number of tokens
        self._rest: dict[int, Curve] = {}  # by size class: by most_drafts
        self._pace = 1.0

    def observe(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        """Learn from a step in which each request computed one known token and its drafts.

        `rest_seconds` None: only the target's part was typical.
        """
        parts = [(self._target, shape.num_tokens, target_seconds)]
        if rest_seconds is not None:
            curve = self._rest.setdefault(size_class(shape.num_requests), Curve())
            parts.append((curve, shape.most_drafts, rest_seconds))
        usual = [seconds for curve, count, _ in parts if (seconds := curve.measured(count)) is not None]
        pace, counted = self._pace, 1.0
        if len(usual) == len(parts) and sum(usual) > 0:
            deviation = sum(seconds for *_, seconds in parts) / (pace * sum(usual))
            counted = CLIP / max(CLIP, deviation)
            # With exp the pace is stationary where the mean deviation is 1, and so are the tables.
            self._pace *= exp((counted * deviation - 1) / PACE_MEMORY)
        for curve, count, seconds in parts:
            curve.observe(count, counted * seconds / pace)

    def knows_rest_without_drafts(self, num_requests: int) -> bool:
        """Whether steps of this size whose drafter is not called were measured often enough."""
        curve = self._rest.get(size_class(num_requests))
        return curve is not None and curve.num_measured(0) >= KNOWN_AFTER

    def seconds(self, shape: StepShape) -> float:
        """The expected time of a step of this shape."""
        return float(self.target(shape.num_tokens) + self.rest(shape.num_requests, shape.most_drafts))

    def target(self, num_tokens: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds of forward and verification, by the number of tokens computed."""
        return self._pace * self._target.at(num_tokens)

    def rest(self, num_requests: int, most_drafts: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """All other seconds of a step, by the drafts of the request that has most."""
        if not self._rest:
            return np.zeros(np.shape(most_drafts))
        own = size_class(num_requests)
        nearest = min(self._rest, key=lambda size: (abs(size - own), size))  # of those that were measured
        return self._pace * self._rest[nearest].at(most_drafts)

    def to_json(self) -> dict[str, Any]:
        """The tables at a pace of 1, with which the next start begins."""
        return {
            "target": self._target.points(self._pace),
            "rest": [(size, curve.points(self._pace)) for size, curve in sorted(self._rest.items())],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepCosts":
        """The tables of `to_json`, which new measurements soon replace.

        Raises ValueError, KeyError or TypeError for other data.
        """

        def curve(points: Iterable[tuple[int, float, float]]) -> Curve:
            return Curve((count, seconds, STORED_SHARE * weight) for count, seconds, weight in points)

        costs = cls()
        costs._target = curve(data["target"])
        costs._rest = {int(size): curve(points) for size, points in data["rest"]}
        return costs


class Curve:
    """Seconds that rise with a count: averages at the measured counts, made monotone.

    More work never takes less time, so averages that fall are noise: neighbours are averaged until they rise.
    """

    def __init__(self, points: Iterable[tuple[int, float, float]] = ()) -> None:
        self._seconds: dict[int, float] = {}
        self._weights: dict[int, float] = {}  # measurements, as far as they are remembered
        self._counts: dict[int, int] = {}  # measurements, however old
        self._measured_at: dict[int, int] = {}  # of each count, the number of measurements until its last one
        self._num_observed = 0
        for count, seconds, weight in points:
            if not isfinite(seconds) or not isfinite(weight):
                raise ValueError(f"a step of {count} took {seconds} seconds, with the weight {weight}")
            self._seconds[int(count)], self._weights[int(count)] = float(seconds), float(weight)
            self._counts[int(count)] = int(weight)
        self._fit: tuple[list[int], list[float]] | None = None  # sorted counts and their fitted seconds

    def observe(self, count: int, seconds: float) -> None:
        usual = self._seconds.get(count, seconds)
        self._counts[count] = self._counts.get(count, 0) + 1
        weight = self._weights[count] = min(MEMORY, 1 + self._weight(count))
        self._num_observed += 1
        self._measured_at[count] = self._num_observed
        if 1 < weight <= 2:  # nothing told yet whether the first one was disturbed
            usual = min(usual, CLIP * seconds)
        self._seconds[count] = usual + (seconds - usual) / weight
        self._fit = None

    def measured(self, count: int) -> float | None:
        """The average at a count; None if it was never measured."""
        return self._seconds.get(count)

    def num_measured(self, count: int) -> int:
        """Measurements at a count."""
        return self._counts.get(count, 0)

    def at(self, count: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Linear between neighbours, constant below the lowest count, extrapolated above the highest.

        1 everywhere if nothing was measured.
        """
        if not self._seconds:
            return np.ones(np.shape(count))
        if self._fit is None:
            counts = sorted(self._seconds)
            averages = [(self._seconds[count], max(LEAST_WEIGHT, self._weight(count))) for count in counts]
            self._fit = counts, rising(averages)
        counts, seconds = self._fit
        slope = 0.0 if len(counts) < 2 else (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        beyond = np.maximum(0.0, np.asarray(count) - counts[-1])
        seconds_at: NDArray[np.float64] = np.interp(np.asarray(count), counts, seconds) + slope * beyond
        return seconds_at

    def points(self, pace: float) -> list[tuple[int, float, float]]:
        return [(count, pace * self._seconds[count], self._weight(count)) for count in sorted(self._seconds)]

    def _weight(self, count: int) -> float:
        """Measurements at a count, less the longer ago the last one was: it may be of another time of the machine."""
        age = self._num_observed - self._measured_at.get(count, 0)
        return self._weights.get(count, 0.0) * float(0.5 ** (age / HALF_LIFE))


def rising(values: Sequence[tuple[float, float]]) -> list[float]:
    """The never falling sequence next to weighted values, in the sense of least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in values:
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, total, length = pools.pop()
            both = total + pool[1]
            pool = ((mean * total + pool[0] * pool[1]) / both, both, length + pool[2])
        pools.append(pool)
    return [mean for mean, _, length in pools for _ in range(length)]
