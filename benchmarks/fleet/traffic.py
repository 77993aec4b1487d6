"""Simulated prompts: a hot prefix, which many requests share, and text of a request's own."""

from itertools import accumulate
from random import Random
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt, and how many of its tokens the best cache would have: those of a prefix that was asked before."""

    token_ids: list[int]
    most_cached: int


class Burst(NamedTuple):
    """A time in which requests arrive more often."""

    start: float
    end: float
    factor: float


class Traffic:
    """Requests at `requests_per_s`. The k-th of the prefixes is as frequent as 1 / k (Zipf's law)."""

    def __init__(
        self,
        requests_per_s: float,
        num_prefixes: int,
        num_prefix: int = 2048,
        num_own: int = 256,
        num_output: int = 48,
        burst: Burst | None = None,
        seed: int = 0,
    ) -> None:
        """`num_prefix`, `num_own`, `num_output`: tokens of each part of a request."""
        self.num_output = num_output
        self._requests_per_s, self._burst = requests_per_s, burst
        self._random = Random(seed)
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(num_prefixes)))
        self._prefixes = [list(range(rank * num_prefix, (rank + 1) * num_prefix)) for rank in range(num_prefixes)]
        self._num_own = num_own
        self._next_token = num_prefixes * num_prefix
        self._asked: set[int] = set()

    def rate(self, now: float) -> float:
        """Requests a second at a time."""
        in_burst = self._burst is not None and self._burst.start <= now < self._burst.end
        return self._requests_per_s * (self._burst.factor if self._burst and in_burst else 1.0)

    def prompt(self) -> Prompt:
        """The next request's prompt."""
        [rank] = self._random.choices(range(len(self._prefixes)), cum_weights=self._weights)
        own = range(self._next_token, self._next_token + self._num_own)
        self._next_token += self._num_own
        most = len(self._prefixes[rank]) if rank in self._asked else 0
        self._asked.add(rank)
        return Prompt([*self._prefixes[rank], *own], most)
