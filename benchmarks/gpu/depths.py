"""The part `depths`: what chains of drafts gain in large batches, by their length, the batch and the context.

Drafts are accepted at simulated lengths: those of the other parts, and a guess for a chain of two.
"""

import tempfile
from pathlib import Path

from benchmarks.gpu.random_model import LLAMA_8B
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.report import Cell, Order, Report, requests
from benchmarks.gpu.speed import VARIANTS, Speed, Variant, measure

CHAINS = [
    VARIANTS[0],
    Variant("chain of 3", 3, 2.9, None),
    Variant("chain of 2", 2, 2.4, None),
    Variant("chain of 5", 5, 3.5, None),
    Variant("chain of 7", 7, 3.9, None),
    Variant("chain of 1", 1, 1.7, None),
]
GOALS = {128: 1.6, 1024: 1.7}  # by context: the gain of the best length with GOAL_REQUESTS
GOAL_REQUESTS = 64
HEADERS = ["chain", "context", "requests", "tokens/s", "step, ms", "gain"]


def report(order: Order) -> Report:
    size, chains, batch_sizes, contexts, num_steps = LLAMA_8B, CHAINS, [64, 16, 128], [128, 1024], 40
    if order.is_tiny:
        size, chains, batch_sizes, contexts, num_steps = TINY_MODEL, CHAINS[:2], [2], [8], 3
    rows, cells = [], []
    for context in contexts:
        found: list[Speed] = []
        with tempfile.TemporaryDirectory() as folder:
            for each in measure(Path(folder), size, order.device, chains, batch_sizes, num_steps, context, (True,)):
                found.append(each)
                rows.append(_row(each, context, gain(each, found)))
                print(", ".join(rows[-1]), flush=True)  # minutes pass before the table
        table = f"Gain of chains over plain decoding, 8B model with random weights, context {context:,}"
        drafted = [each for each in found if each.variant.chain]
        cells += [
            Cell(table, each.variant.title, requests(each.batch_size), gain(each, found), "{:.2f}") for each in drafted
        ]
        for batch_size in batch_sizes:
            best = max(gain(each, found) for each in drafted if each.batch_size == batch_size)
            goal = GOALS.get(context) if batch_size == GOAL_REQUESTS else None
            cells.append(Cell(table, "best length", requests(batch_size), best, "{:.2f}", goal))
    return Report(HEADERS, rows, 1, f"{size.name}, {num_steps} steps", cells)


def gain(speed: Speed, found: list[Speed]) -> float:
    """Over plain decoding of as many requests, which was measured first."""
    [plain] = [each for each in found if not each.variant.chain and each.batch_size == speed.batch_size]
    return speed.tokens_per_s / plain.tokens_per_s


def _row(speed: Speed, context: int, gained: float) -> list[str]:
    figures = [f"{speed.tokens_per_s:.0f}", f"{speed.step_ms:.2f}", f"{gained:.2f}"]
    return [speed.variant.title, str(context), str(speed.batch_size), *figures]
