"""The main panels drawn from a live Prometheus as one PNG; needs matplotlib, which is optional."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from specray.dashboard.panels import DRAFTER_INFO, Panel, panels
from specray.dashboard.query import Series, query_range
from specray.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN_ROWS = {"Speculation", "Steps", "Latency", "Load"}  # of the dashboard: what the picture shows
WINDOW = "1m"  # Ray's metrics change every ten seconds
NUM_POINTS = 200  # of a curve
NUM_COLUMNS = 3
HEADROOM = 1.1  # space above the highest point
MAX_TICKS = 6  # of the clock
TICK_SECONDS = (10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)
MAX_NAMES = 10  # entries in a legend; more would hide the curves
UNITS = {"s": "seconds", "percentunit": "share", "none": ""}

Curves = dict[str, Series]  # by name


def save_png(path: Path, url: str, start: float, end: float) -> None:
    """Draw the main panels from `start` to `end`. ConfigError without matplotlib, Prometheus or data."""
    shown = [panel for panel in panels() if panel.row in MAIN_ROWS]
    curves = [_curves(panel, url, start, end) for panel in shown]
    if not any(curves):
        raise ConfigError(
            f"the Prometheus at {url} has none of our metrics in this time; does it scrape Ray's nodes, as "
            "prometheus.yaml of `specray dashboard --write` does, and was there a request?"
        )
    infos = query_range(url, f"group by (application) ({DRAFTER_INFO})", start, end, end - start)
    name = ", ".join(sorted({series.labels["application"] for series in infos if "application" in series.labels}))
    _draw(path, name or url, list(zip(shown, curves, strict=True)), (start, end))


def _curves(panel: Panel, url: str, start: float, end: float) -> Curves:
    step = max(1.0, (end - start) / NUM_POINTS)
    return {
        query.name(series.labels): series
        for query in panel.queries
        for series in query_range(url, query.over(WINDOW), start, end, step)
    }


def _draw(path: Path, name: str, drawings: list[tuple[Panel, Curves]], span: tuple[float, float]) -> None:
    """`span` is the first and the last second."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MultipleLocator
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib ({error}); run `pip install specray[dashboard]`") from None
    num_rows = -(-len(drawings) // NUM_COLUMNS)
    figure = Figure(figsize=(5 * NUM_COLUMNS, 3 * num_rows), layout="constrained")
    first, last = map(_clock, span)
    figure.suptitle(f"SpecRay {name}, {first:%d %B %Y, %H:%M:%S} to {last:%H:%M:%S} ({last:%Z})")
    for place, (panel, curves) in enumerate(drawings, start=1):
        axes = figure.add_subplot(num_rows, NUM_COLUMNS, place)
        _draw_panel(axes, panel, curves)
        axes.set_xlim(*span)
        axes.xaxis.set_major_locator(MultipleLocator(_tick_seconds(span[1] - span[0])))
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{_clock(seconds):%H:%M:%S}".removesuffix(":00"))
    figure.savefig(path, dpi=110)


def _draw_panel(axes: "Axes", panel: Panel, curves: Curves) -> None:
    axes.set_title(panel.title, fontsize="medium")
    axes.set(ylabel=UNITS.get(panel.unit, panel.unit.removeprefix("suffix: ")))
    axes.grid(alpha=0.3)
    if not curves:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
        return
    if panel.is_stacked:
        _stack(axes, curves)
    else:
        for name, series in curves.items():
            axes.plot(series.times, series.values, label=name)
    axes.set_ylim(0, HEADROOM * axes.dataLim.y1 or 1.0)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[:MAX_NAMES], names[:MAX_NAMES], fontsize="x-small")


def _tick_seconds(seconds: float) -> float:
    """The time between two marks of the clock: a round one, so that no more than MAX_TICKS are needed."""
    return next((step for step in TICK_SECONDS if seconds / step <= MAX_TICKS), seconds)


def _clock(seconds: float) -> datetime:
    """The local time of `seconds` since 1970."""
    return datetime.fromtimestamp(seconds).astimezone()


def _stack(axes: "Axes", curves: Curves) -> None:
    """Stacked areas; a curve without a point at some time has height 0 there."""
    times = sorted({time for series in curves.values() for time in series.times})
    heights = [dict(zip(series.times, series.values, strict=True)) for series in curves.values()]
    axes.stackplot(times, *([points.get(time, 0.0) for time in times] for points in heights), labels=list(curves))
