"""The choice of a step's drafts, as a pure function."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Nodes that bring less are never worth a row of a forward: with a step of one row taking as long as a plain step, they
# would have to cost less than a hundredth of it.
LEAST_GAIN = 0.01


def allocate(
    gains: Sequence[Sequence[float]], step_seconds: Callable[[Floats, Floats], Floats], most_drafts: int
) -> list[int]:
    """Draft tokens for each request, in descending order of gain, as many as generate the most tokens per second.

    `gains[i][k]` are the tokens that draft k + 1 of request i is expected to bring, never rising in k.
    `step_seconds(n, m)` are the times of steps with n drafts in all, and with m for the request that has most. It is
    called once for all choices: hundreds of requests offer a thousand nodes in every step. At most `most_drafts` are
    chosen; ties go to fewer drafts, older requests and earlier nodes.
    """
    offers = sorted(
        (-gain, place, row)
        for row, row_gains in enumerate(gains)
        for place, gain in enumerate(row_gains)
        if gain >= LEAST_GAIN
    )[:most_drafts]
    tokens = len(gains) - np.cumsum([0.0, *(negative_gain for negative_gain, *_ in offers)])
    most = np.maximum.accumulate([0.0, *(place + 1.0 for _, place, _ in offers)])
    rates = tokens / step_seconds(np.arange(len(offers) + 1.0), most)
    num_drafts = [0] * len(gains)
    for _, _, row in offers[: int(rates.argmax())]:
        num_drafts[row] += 1
    return num_drafts
