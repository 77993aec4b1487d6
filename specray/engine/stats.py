"""The engine's counters: plain numbers, written by the step loop's thread and copied by `snapshot` after each step."""

from bisect import bisect_left
from dataclasses import dataclass, field

from specray.metrics import METRICS, SECONDS_BUCKETS, HistogramSnapshot, Snapshot

MAX_POSITIONS = 64  # acceptance is counted for this many positions


@dataclass(slots=True)
class Histogram:
    """Counts per bucket up to each of `bounds` (the last is +Inf), and the sum of the values."""

    bounds: tuple[float, ...] = SECONDS_BUCKETS
    buckets: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineStats:
    """Counters by the names of METRICS: those without a label in `values`, the others in `labelled`."""

    def __init__(self, drafter: str | None = None) -> None:
        self.values: dict[str, float] = {m.name: 0 for m in METRICS if m.kind != "histogram" and m.label is None}
        self.labelled: dict[str, dict[str, float]] = {
            m.name: dict.fromkeys(m.label_values, 0) for m in METRICS if m.label is not None
        }
        self.histograms: dict[str, Histogram] = {m.name: Histogram(m.bounds) for m in METRICS if m.kind == "histogram"}
        self.name_drafter(drafter)

    def add(self, name: str, amount: float = 1) -> None:
        self.values[name] += amount

    def add_labelled(self, name: str, label: str, amount: float = 1) -> None:
        series = self.labelled[name]
        series[label] = series.get(label, 0) + amount

    def set(self, name: str, value: float) -> None:
        self.values[name] = value

    def name_drafter(self, drafter: str | None) -> None:
        """Set the method in use; methods used before remain, as zero."""
        info = self.labelled["specray_drafter_info"]
        info.update(dict.fromkeys(info, 0) | {drafter or "none": 1})

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def accepted(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verified tree."""
        self.add("specray_verify_steps_total")
        if num_draft_tokens == 0:
            return
        self.add("specray_spec_decode_num_drafts_total")
        self.add("specray_spec_decode_num_draft_tokens_total", num_draft_tokens)
        self.add("specray_spec_decode_num_accepted_tokens_total", num_accepted)
        for position in range(min(num_accepted, MAX_POSITIONS)):
            self.add_labelled("specray_spec_decode_num_accepted_tokens_per_pos_total", str(position))

    def snapshot(self) -> Snapshot:
        """A copy for other threads and processes."""
        copy: Snapshot = dict(self.values)
        copy.update({name: dict(series) for name, series in self.labelled.items()})
        for name, histogram in self.histograms.items():
            copy[name] = HistogramSnapshot(list(histogram.buckets), histogram.total, histogram.bounds)
        return copy
