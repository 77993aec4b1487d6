"""The choice of a step's drafts, as a pure function."""

from collections.abc import Callable, Sequence

# Nodes that bring less are never worth a row of a forward: with a step of one row taking as long as a plain step, they
# would have to cost less than a hundredth of it.
LEAST_GAIN = 0.01


def allocate(
    gains: Sequence[Sequence[float]], step_seconds: Callable[[int, int], float], most_drafts: int
) -> list[int]:
    """Draft tokens for each request, in descending order of gain, as many as generate the most tokens per second.

    `gains[i][k]` are the tokens that draft k + 1 of request i is expected to bring, never rising in k.
    `step_seconds(n, m)` is the time of a step with n drafts in all, and with m for the request that has most.
    At most `most_drafts` are chosen; ties go to fewer drafts, older requests and earlier nodes.
    """
    offers = sorted(
        (-gain, place, row)
        for row, row_gains in enumerate(gains)
        for place, gain in enumerate(row_gains)
        if gain >= LEAST_GAIN
    )[:most_drafts]
    tokens, most = float(len(gains)), 0
    best_rate, best_count = tokens / step_seconds(0, 0), 0
    for count, (negative_gain, place, _) in enumerate(offers, start=1):
        tokens, most = tokens - negative_gain, max(most, place + 1)
        rate = tokens / step_seconds(count, most)
        if rate > best_rate:
            best_rate, best_count = rate, count
    num_drafts = [0] * len(gains)
    for _, _, row in offers[:best_count]:
        num_drafts[row] += 1
    return num_drafts
