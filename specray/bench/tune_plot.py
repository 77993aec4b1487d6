"""A bar chart of trees as PNG; needs matplotlib, which is optional."""

from collections.abc import Mapping
from pathlib import Path

BAR_HEIGHT = 0.8


def save_plot(path: Path, ratios: Mapping[str, Mapping[int, float]], title: str) -> bool:
    """Draw `ratios`: tree -> batch size -> tokens/s over plain decoding. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
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
