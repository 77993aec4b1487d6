"""Plots a run's validation metrics over training tokens."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specray.train.checkpoint import read_log

PLOT = "plot.png"
NO_PLOT = "there will be no plot, because matplotlib is not installed; `pip install 'specray[train]'` brings it"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_run(run: Path) -> None:
    """Draw `plot.png` from the run's log, where matplotlib is installed."""
    points = [line for line in read_log(run) if line["validation"]]
    if points and can_plot():
        _draw(points, run / PLOT)


def _draw(points: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    millions = [point["tokens"] / 1e6 for point in points]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, label in (("accept_length", "chain"), ("accept_length_top4", "in the best 4")):
        left.plot(millions, [point["validation"][name] for point in points], marker=".", label=label)
    left.set(xlabel="million tokens seen", ylabel="estimated accept length", title="Accept length, held-out answers")
    for depth in range(len(points[0]["validation"]["conditional"])):
        shares = [point["validation"]["conditional"][depth] for point in points]
        right.plot(millions, shares, marker=".", label=f"depth {depth + 1}")
    right.set(xlabel="million tokens seen", ylabel="agreement", title="Best token agrees, given all before did")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
