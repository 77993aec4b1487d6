"""How much longer the accept length of a shadow drafter is than that of the drafter in use, with an interval.

Both draft after the same tokens of the same requests, so each tree of one is compared with the other's tree there. The
trees of one request are alike, so a request counts once, with the sum of its differences. The interval is an asymptotic
confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, https://arxiv.org/abs/2103.06476, theorem 2.2): it
holds at all times together, so it may be looked at after each request without raising the rate of false promotions.
"""

from collections.abc import Iterable
from math import log, sqrt
from typing import NamedTuple

ERROR_RATE = 0.05  # share of comparisons whose interval ever leaves out the true gain
MIN_REQUESTS = 32  # with fewer the variance is not known
TIGHTEST_AT = 256  # requests


class PairedGain(NamedTuple):
    """Sums over the requests that were compared."""

    num_requests: float = 0
    num_trees: float = 0
    total: float = 0.0  # drafts that the target accepted of the shadow's trees, less those of the verified ones
    squares: float = 0.0  # sum of the squares of each request's total

    @classmethod
    def of(cls, parts: "Iterable[PairedGain]") -> "PairedGain":
        """The sums over all engines, each of which has its own."""
        return cls(*map(sum, zip(*parts, strict=True)))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Bounds of the gain in accept length; None while there are too few requests.

        They are those of a request's mean total, divided by the mean number of its trees.
        """
        count = self.num_requests
        if count < MIN_REQUESTS or not self.num_trees:
            return None
        mean = self.total / count
        deviation = sqrt(max(0.0, self.squares / count - mean * mean) * count / (count - 1))
        half_width = deviation * _width(count)
        trees = self.num_trees / count
        return (mean - half_width) / trees, (mean + half_width) / trees


def _width(count: float) -> float:
    """Half the width of the interval for the mean of `count` values with a standard deviation of 1."""
    spread = -2 * log(ERROR_RATE)
    rho2 = (spread + log(spread) + 1) / TIGHTEST_AT
    scaled = count * rho2 + 1
    return sqrt(2 * scaled / (count * count * rho2) * log(sqrt(scaled) / ERROR_RATE))
