"""Charts as PNG; they need matplotlib, which is optional."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from specray.bench.ledger import Ending, Outcome

BAR_HEIGHT = 0.8
COLORS = {
    Outcome.COMPLETE: "tab:green",
    Outcome.ERROR: "tab:red",
    Outcome.REFUSED: "tab:orange",
    Outcome.ABORTED: "tab:gray",
    Outcome.BROKEN: "black",
}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def save_load_plot(path: Path, endings: Sequence[Ending], latencies: Mapping[str, Sequence[float]]) -> None:
    """Draw the distribution of each of `latencies`, and how long each request took at the time when it was sent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, times in latencies.items():
        left.ecdf([1000 * seconds for seconds in times], label=name)
    if latencies:
        left.set_xscale("log")
        left.legend(loc="lower right")
    left.set(title="Latency of complete requests", xlabel="milliseconds", ylabel="share of them within this time")
    for outcome, color in COLORS.items():
        if shown := [ending for ending in endings if ending.outcome is outcome]:
            places = [ending.sent_s for ending in shown], [ending.seconds for ending in shown]
            right.scatter(*places, s=12, color=color, label=f"{outcome} ({len(shown)})")
    right.set(title="Each request", xlabel="sent at, seconds", ylabel="ended after, seconds")
    right.set_ylim(bottom=0)
    if endings:
        right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def save_tree_plot(path: Path, ratios: Mapping[str, Mapping[int, float]], title: str) -> bool:
    """Draw `ratios`: tree -> batch size -> tokens/s over plain decoding. Without matplotlib, a message and False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed; run `pip install specray[train]` for one", file=sys.stderr)
        return False
    sizes = list(next(iter(ratios.values())))
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    height = BAR_HEIGHT / len(sizes)
    for number, size in enumerate(sizes):
        places = [row + (number - (len(sizes) - 1) / 2) * height for row in range(len(ratios))]
        bars = axes.barh(places, [by_size[size] for by_size in ratios.values()], height, label=f"batch size {size}")
        axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="output tokens/s, times plain decoding", ylabel="tree (steps-topk-nodes)")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
