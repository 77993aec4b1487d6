"""The interval of a shadow's gain holds at all looks together, and is narrow enough to be of use."""

from itertools import accumulate
from random import Random

import pytest

from specray.engine.drafter_selection.paired_gain import ERROR_RATE, MIN_REQUESTS, PairedGain

NUM_REQUESTS = 800


def requests(random: Random, gain: float) -> list[PairedGain]:
    """Sums after each request: lengths differ by a hundred times, and the trees of a request are alike."""
    ended = []
    for _ in range(NUM_REQUESTS):
        num_trees = max(1, min(200, round(random.expovariate(1 / 25))))
        own = random.gauss(gain, 0.5)
        total = round(num_trees * own + random.gauss(0.0, 1.5 * num_trees**0.5))
        ended.append(PairedGain(1, num_trees, total, total * total))
    return list(accumulate(ended, lambda a, b: PairedGain.of((a, b))))


def test_few_equal_heads_are_ever_promoted_however_often_one_looks() -> None:
    """A shadow that is as good as the drafter in use is better, or worse, by chance only."""
    random, found, num_runs = Random(5), 0, 120
    for _ in range(num_runs):
        bounds = [sums.interval for sums in requests(random, 0.0)]
        found += any(each is not None and each[0] > 0 for each in bounds)
    assert found <= num_runs * ERROR_RATE / 2, "each side has half of the error rate"


@pytest.mark.parametrize(("gain", "within"), [(0.3, 250), (0.15, 800)])
def test_a_better_head_is_found_soon(gain: float, within: int) -> None:
    for seed in range(5):
        sums = requests(Random(seed), gain)
        first = next(number for number, each in enumerate(sums, 1) if each.interval and each.interval[0] > 0)
        assert first <= within
        low, high = sums[-1].interval or (0.0, 0.0)
        assert low < gain < high
        assert high - low < 0.2


def test_few_requests_say_nothing() -> None:
    assert PairedGain(MIN_REQUESTS - 1, 100, 99.0, 400.0).interval is None
    assert PairedGain(MIN_REQUESTS, 0, 0.0, 0.0).interval is None
    assert PairedGain(MIN_REQUESTS, MIN_REQUESTS, MIN_REQUESTS, MIN_REQUESTS).interval == (1.0, 1.0)
