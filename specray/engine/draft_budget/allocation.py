"""The choice of a step's drafts, as a pure function."""

from collections.abc import Callable, Sequence
from itertools import count, takewhile

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Nodes that bring less are never worth a row of a forward: with a step of one row taking as long as a plain step, they
# would have to cost less than a hundredth of it.
LEAST_GAIN = 0.01


def allocate(
    gains: Sequence[Sequence[float]],
    step_seconds: Callable[[Floats, Floats], Floats],
    most_drafts: int,
    num_others: int = 0,
) -> list[int]:
    """Draft tokens for each request, in descending order of gain, as many as generate the most tokens per second.

    `gains[i][k]` are the tokens that draft k + 1 of request i is expected to bring, never rising in k.
    `step_seconds(n, m)` are the times of steps with n drafts in all, and with m for the request that has most. It is
    called once for many choices: hundreds of requests offer a thousand nodes in every step. One request with a long
    certain tree would make the step dear for all, so limits of m are compared too: 1, 2, 4, … At most `most_drafts` are
    chosen; ties go to fewer drafts, older requests and earlier nodes. `num_others` more requests of the step generate a
    token each.
    """
    offers = sorted(
        (-gain, place, row)
        for row, row_gains in enumerate(gains)
        for place, gain in enumerate(row_gains)
        if gain >= LEAST_GAIN
    )
    negative_gains, places, rows = np.array(offers, np.float64).reshape(-1, 3).T
    most_of_any = max(map(len, gains), default=0)
    best, chosen = -np.inf, rows[:0]
    for limit in [*takewhile(most_of_any.__gt__, (1 << power for power in count())), most_of_any]:
        kept = np.flatnonzero(places < limit)[:most_drafts]
        tokens = num_others + len(gains) - np.cumsum([0.0, *negative_gains[kept]])
        most = np.maximum.accumulate([0.0, *(places[kept] + 1.0)])
        rates = tokens / step_seconds(np.arange(len(kept) + 1.0), most)
        if rates.max() > best:
            best, chosen = rates.max(), rows[kept[: int(rates.argmax())]]
    num_drafts: list[int] = np.bincount(chosen.astype(np.int64), minlength=len(gains)).tolist()
    return num_drafts
