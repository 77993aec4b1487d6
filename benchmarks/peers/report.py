"""Tables in Markdown, a JSON document and a bar chart of a comparison."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.engines import COPYING, EIGHT, ENGINES, ONE, OURS, PREFILL, RATIOS, Engine
from benchmarks.peers.measure import CONCURRENCY, PREFILL_TOKENS, Sample, compared, median_ttft, medians
from benchmarks.results import Result
from specray.tables import format_table

TITLES = {
    ONE: "one request",
    COPYING: "one request, copying",
    EIGHT: f"{CONCURRENCY} at once",
    PREFILL: f"prefill of {PREFILL_TOKENS:,}",
}
NOT_MEASURED = "-"
SPEEDS, RATIO = "Tokens a second, beside peers", "Beside peers"  # tables of `benchmarks.results`
FIRST_TOKEN = "first token, ms"


class Outcome(NamedTuple):
    """Everything that a report needs."""

    samples: Sequence[Sample]
    failures: Mapping[str, str]  # engine -> why it has no figures, or not all
    versions: Mapping[str, str]  # peer -> version and notes
    machine: str
    day: date
    settings: Mapping[str, Any]


def to_markdown(outcome: Outcome) -> str:
    """Speeds, ratios, failures, versions, machine and date."""
    parts = [speed_table(outcome), ratio_table(outcome.samples)]
    parts += [f"{name}: {reason.rstrip('.')}." for name, reason in outcome.failures.items()]
    versions = "; ".join(f"{peer} {version}" for peer, version in outcome.versions.items())
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in outcome.settings.items())
    parts += [f"{outcome.day.isoformat()}. {versions}.", f"{outcome.machine}. Settings: {settings}."]
    return "\n\n".join(part for part in parts if part)


def speed_table(outcome: Outcome) -> str:
    """Median tokens per second; the fastest of each column in bold."""
    speeds, ttft = medians(outcome.samples), median_ttft(outcome.samples)
    engines = [engine for engine in ENGINES if _is_known(engine, outcome)]
    rows = [
        [
            engine.peer.name,
            f"{engine.weights}, {engine.method}",
            *(_cell(speeds.get(workload, {}), engine.name) for workload in TITLES),
            f"{1000 * ttft[engine.name]:.0f} ms" if engine.name in ttft else NOT_MEASURED,
        ]
        for engine in engines
    ]
    return format_table(("engine", "weights, method", *TITLES.values(), "first token"), rows)


def ratio_table(samples: Sequence[Sample]) -> str:
    """Our speed over a peer's; in bold where the peer is faster."""
    names = {engine.name: f"{engine.peer.name} {engine.weights} {engine.method}" for engine in ENGINES}
    rows = [
        [f"{names[row.ours]} / {names[row.theirs]}", TITLES[row.workload], _ratio(row.ratio)]
        for row in compared(samples, RATIOS)
    ]
    return format_table(("tokens/s", "on", "ratio"), rows) if rows else ""


def to_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "day": outcome.day.isoformat(),
        "machine": outcome.machine,
        "versions": dict(outcome.versions),
        "settings": dict(outcome.settings),
        "failures": dict(outcome.failures),
        "tokens_per_s": medians(outcome.samples),
        "ttft_s": median_ttft(outcome.samples),
        "ratios": [row._asdict() for row in compared(outcome.samples, RATIOS)],
        "samples": [sample._asdict() for sample in outcome.samples],
    }


def results(outcome: Outcome, commit: str) -> list[Result]:
    """Speeds and ratios for `benchmarks.results`."""
    found = []
    speeds, ttft = medians(outcome.samples), median_ttft(outcome.samples)
    for engine in ENGINES:
        row = f"{engine.peer.name}, {engine.weights}, {engine.method}"
        for workload, title in TITLES.items():
            if (speed := speeds.get(workload, {}).get(engine.name)) is not None:
                form = "{:,.0f}" if speed >= 100 else "{:.1f}"
                found.append(Result(table=SPEEDS, row=row, column=title, value=speed, form=form, commit=commit))
        if engine.name in ttft:
            value, form = 1000 * ttft[engine.name], "{:.0f}"
            found.append(Result(table=SPEEDS, row=row, column=FIRST_TOKEN, value=value, form=form, commit=commit))
    names = {engine.name: f"{engine.peer.name} {engine.weights} {engine.method}" for engine in ENGINES}
    for each in compared(outcome.samples, RATIOS):
        row, column = f"{names[each.ours]} / {names[each.theirs]}", TITLES[each.workload]
        found.append(Result(table=RATIO, row=row, column=column, value=each.ratio, commit=commit))
    return found


def save_chart(path: Path, outcome: Outcome) -> None:
    """Bars of every engine for every workload, as the file's suffix says (SVG or PNG)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    speeds = medians(outcome.samples)
    shown = [workload for workload in TITLES if speeds.get(workload)]
    engines = [engine for engine in ENGINES if any(engine.name in speeds[workload] for workload in shown)]
    if not engines:
        return
    with rc_context({"svg.hashsalt": "peers"}):  # equal figures give equal files
        figure = Figure(figsize=(3.2 * len(shown) + 2.5, 1.6 + 0.3 * len(engines)), layout="constrained")
        all_axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for workload, axes in zip(shown, all_axes, strict=True):
            values = [speeds[workload].get(engine.name, 0.0) for engine in engines]
            colors = ["tab:blue" if engine.peer.name == OURS else "tab:gray" for engine in engines]
            bars = axes.barh(range(len(engines)), values, color=colors)
            axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in values], padding=2, fontsize=8)
            axes.margins(x=0.15)
            axes.set(title=TITLES[workload], xlabel="tokens/s")
            axes.spines[["top", "right"]].set_visible(False)
        labels = [f"{engine.peer.name}, {engine.weights}, {engine.method}" for engine in engines]
        all_axes[0].set_yticks(range(len(engines)), labels, fontsize=8)
        all_axes[0].invert_yaxis()
        versions = ", ".join(f"{peer} {version.partition(' (')[0]}" for peer, version in outcome.versions.items())
        figure.suptitle(f"{versions}\n{outcome.machine}, {outcome.day.isoformat()}", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)


def _is_known(engine: Engine, outcome: Outcome) -> bool:
    return engine.name in outcome.failures or any(sample.engine == engine.name for sample in outcome.samples)


def _cell(speeds: Mapping[str, float], name: str) -> str:
    if name not in speeds:
        return NOT_MEASURED
    text = f"{speeds[name]:,.0f}" if speeds[name] >= 100 else f"{speeds[name]:.1f}"
    return f"**{text}**" if speeds[name] == max(speeds.values()) else text


def _ratio(value: float) -> str:
    return f"**{value:.2f}**" if value < 1 else f"{value:.2f}"
