"""What a step costs, learnt from steps that only decode.

A step's time has two parts. The target's, forward and verification, depends on the number of tokens it computes, in
steps and bends that differ from machine to machine: it is kept in a table. The rest, drafting above all, depends on the
number of requests and the size of their trees: it is fitted.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

LEARNING_RATE = 1 / 16  # of a step
CLIP = 3.0  # a step that takes longer than this many times the usual was disturbed, and counts as this
FIT_MEMORY = 1 - 1 / 2048  # of a step
RIDGE = 1e-3


class StepShape(NamedTuple):
    """What the costs depend on."""

    num_requests: int
    num_drafts: int  # over all requests
    most_drafts: int  # of the request that has most
    feeds_drafter: bool

    def terms(self) -> tuple[float, ...]:
        """The terms of the fit: of every step, of drafting anything, and of the size of the trees."""
        requests, feeds, most = float(self.num_requests), float(self.feeds_drafter), float(self.most_drafts)
        return 1.0, requests, feeds, feeds * requests, most, most * requests


class StepCosts:
    """Seconds of a step by its shape. Without any measurement every step costs the same."""

    def __init__(self) -> None:
        self._target: dict[int, float] = {}  # seconds by number of tokens
        self._tokens: list[int] = []  # sorted keys of _target
        self._rest = LeastSquares(len(StepShape(0, 0, 0, False).terms()))

    def observe(self, shape: StepShape, target_seconds: float, rest_seconds: float) -> None:
        """Learn from a step in which each request computed one known token and its drafts."""
        num_tokens = shape.num_requests + shape.num_drafts
        usual = self._target.get(num_tokens)
        if usual is None:
            self._tokens.insert(bisect_left(self._tokens, num_tokens), num_tokens)
            self._target[num_tokens] = target_seconds
        else:
            self._target[num_tokens] += LEARNING_RATE * (min(target_seconds, CLIP * usual) - usual)
        expected = self._rest.predict(shape.terms())
        disturbed = self._rest.is_fitted and rest_seconds > CLIP * max(expected, target_seconds)
        self._rest.observe(shape.terms(), expected if disturbed else rest_seconds)

    def seconds(self, shape: StepShape) -> float:
        """The expected time of a step of this shape."""
        rest = max(0.0, self._rest.predict(shape.terms()))
        return (self._target_seconds(shape.num_requests + shape.num_drafts) + rest) or 1.0

    def to_json(self) -> dict[str, Any]:
        return {"target": sorted(self._target.items()), "rest": self._rest.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepCosts":
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for data that is not its result."""
        costs = cls()
        costs._target = {int(num_tokens): float(seconds) for num_tokens, seconds in data["target"]}
        costs._tokens = sorted(costs._target)
        costs._rest = LeastSquares.from_json(data["rest"])
        return costs

    def _target_seconds(self, num_tokens: int) -> float:
        """Between measured numbers of tokens on a line, below the smallest as there, above the largest in proportion.

        More tokens never cost less: what seems so is noise.
        """
        if not self._tokens:
            return 0.0
        place = bisect_left(self._tokens, num_tokens)
        if place == len(self._tokens):
            return self._target[self._tokens[-1]] * self._growth(num_tokens)
        upper = self._tokens[place]
        if upper == num_tokens or place == 0:
            return self._target[upper]
        lower = self._tokens[place - 1]
        share = (num_tokens - lower) / (upper - lower)
        below, above = self._target[lower], self._target[upper]
        return below + share * max(0.0, above - below)

    def _growth(self, num_tokens: int) -> float:
        """Time of more tokens than were ever measured, relative to the most that were."""
        if len(self._tokens) == 1:
            return 1.0  # nothing is known: trying it out will tell
        lower, upper = self._tokens[-2:]
        slope = max(0.0, self._target[upper] / self._target[lower] - 1) / (upper - lower)
        return 1 + slope * (num_tokens - upper)


class LeastSquares:
    """A linear fit whose older observations count less; terms that were never seen weigh nothing."""

    def __init__(self, num_terms: int) -> None:
        self._products = [[0.0] * num_terms for _ in range(num_terms)]
        self._targets = [0.0] * num_terms
        self._weights: list[float] | None = None

    @property
    def is_fitted(self) -> bool:
        return any(self._targets)

    def observe(self, terms: Sequence[float], value: float) -> None:
        for row, term in enumerate(terms):
            products = self._products[row]
            for column, other in enumerate(terms):
                products[column] = products[column] * FIT_MEMORY + term * other
            self._targets[row] = self._targets[row] * FIT_MEMORY + term * value
        self._weights = None

    def predict(self, terms: Sequence[float]) -> float:
        if self._weights is None:
            ridge = [[value + RIDGE * (row == column) for column, value in enumerate(products)]
                     for row, products in enumerate(self._products)]
            self._weights = _solve(ridge, self._targets)
        return sum(weight * term for weight, term in zip(self._weights, terms, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"products": self._products, "targets": self._targets}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LeastSquares":
        fit = cls(len(data["targets"]))
        fit._targets = [float(value) for value in data["targets"]]
        fit._products = [[float(value) for value in row] for row in data["products"]]
        return fit


def _solve(matrix: list[list[float]], values: Sequence[float]) -> list[float]:
    """Gaussian elimination for a positive definite matrix, which needs no pivoting."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    size = len(rows)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            for column in range(place, size + 1):
                row[column] -= factor * pivot[column]
    solution = [0.0] * size
    for place in range(size - 1, -1, -1):
        known = sum(rows[place][column] * solution[column] for column in range(place + 1, size))
        solution[place] = (rows[place][size] - known) / rows[place][place]
    return solution
