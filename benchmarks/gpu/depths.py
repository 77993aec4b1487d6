"""The part `depths`: what chains of drafts gain in large batches, by their length, the batch and the context.

Drafts are accepted at simulated lengths: those of the other parts, and a guess for a chain of two.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.random_model import LLAMA_8B, ModelSize
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
    found: dict[int, list[Speed]] = {context: [] for context in contexts}
    rows = []
    for context, each in order.time_limit.in_time(
        _measured(contexts, size, order.device, chains, batch_sizes, num_steps)
    ):
        found[context].append(each)
        rows.append(_row(each, context, gain(each, found[context])))
        print(", ".join(rows[-1]), flush=True)  # minutes pass before the table
    cells = [cell for context in contexts for cell in _cells(context, found[context], len(chains) - 1)]
    return Report(HEADERS, rows, 1, f"{size.name}, {num_steps} steps", cells)


def _measured(
    contexts: Sequence[int],
    size: ModelSize,
    device: torch.device,
    chains: Sequence[Variant],
    batch_sizes: Sequence[int],
    num_steps: int,
) -> Iterator[tuple[int, Speed]]:
    """(context, speed)."""
    for context in contexts:
        with tempfile.TemporaryDirectory() as folder:
            for each in measure(Path(folder), size, device, chains, batch_sizes, num_steps, context, (True,)):
                yield context, each


def _cells(context: int, found: list[Speed], num_lengths: int) -> Iterator[Cell]:
    """The gain of each length, and of the best one once all `num_lengths` were measured."""
    table = f"Gain of chains over plain decoding, 8B model with random weights, context {context:,}"
    gains: dict[int, list[float]] = {}  # by batch size
    for each in found:
        if each.variant.chain:
            gained = gain(each, found)
            gains.setdefault(each.batch_size, []).append(gained)
            yield Cell(table, each.variant.title, requests(each.batch_size), gained)
    for batch_size, of_chains in gains.items():
        if len(of_chains) < num_lengths:
            continue
        goal = GOALS.get(context) if batch_size == GOAL_REQUESTS else None
        yield Cell(table, "best length", requests(batch_size), max(of_chains), goal=goal)


def gain(speed: Speed, found: list[Speed]) -> float:
    """Over plain decoding of as many requests, which was measured first."""
    [plain] = [each for each in found if not each.variant.chain and each.batch_size == speed.batch_size]
    return speed.tokens_per_s / plain.tokens_per_s


def _row(speed: Speed, context: int, gained: float) -> list[str]:
    figures = [f"{speed.tokens_per_s:.0f}", f"{speed.step_ms:.2f}", f"{gained:.2f}"]
    return [speed.variant.title, str(context), str(speed.batch_size), *figures]
