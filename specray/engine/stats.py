"""The engine's counters: plain numbers, written by the step loop's thread and copied by `snapshot` once a second."""

from bisect import bisect_left
from dataclasses import dataclass, field

from specray.metrics import METRICS, SECONDS_BUCKETS, HistogramSnapshot, Snapshot

MAX_POSITIONS = 64  # acceptance is counted for this many positions


@dataclass(slots=True)
class Histogram:
    """Counts per bucket of SECONDS_BUCKETS (the last is +Inf), their number and sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total += seconds


class EngineStats:
    """Counters by the names of METRICS: those without a label in `values`, the others in `labelled`."""

    def __init__(self, drafter: str | None = None) -> None:
        self.values: dict[str, float] = {m.name: 0 for m in METRICS if m.kind != "histogram" and m.label is None}
        self.labelled: dict[str, dict[str, float]] = {
            m.name: dict.fromkeys(m.label_values, 0) for m in METRICS if m.label is not None
        }
        self.histograms: dict[str, Histogram] = {m.name: Histogram() for m in METRICS if m.kind == "histogram"}
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

    def observe(self, name: str, seconds: float) -> None:
        self.histograms[name].observe(seconds)

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
        copy.update({name: HistogramSnapshot(list(h.buckets), h.total) for name, h in self.histograms.items()})
        return copy
