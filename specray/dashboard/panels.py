"""The panels of `specray.json`, a dashboard as Grafana reads it, for the picture without Grafana and for tests.

They read Ray's metrics (`ray_specray_…`) and not the ingress's /metrics. Each node exports the engines that run on it,
so the labels `replica` and `instance` (the node) distinguish them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).with_name("specray.json")
DRAFTER_INFO = "ray_specray_drafter_info"
_WINDOW = "$__rate_interval"  # filled in by Grafana with at least four scrape intervals
_SELECTED = re.compile(r"\$(application|replica)\b")  # variables of the dashboard


class Query(NamedTuple):
    """Curves: one for each series of the expression, named by `legend` with its labels filled in."""

    expression: str
    legend: str

    def over(self, window: str) -> str:
        """The expression for Prometheus, over all engines, with Grafana's window replaced."""
        return _SELECTED.sub(".*", self.expression.replace(_WINDOW, window))

    def name(self, labels: Mapping[str, str]) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), self.legend)


class Panel(NamedTuple):
    row: str  # the title of its row
    title: str
    unit: str  # Grafana's name of it
    description: str
    queries: tuple[Query, ...]
    is_stacked: bool


def panels() -> list[Panel]:
    """All panels in order. An open row is followed by its panels; one that is closed holds them."""
    found, row = [], ""
    for entry in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if entry["type"] == "row":
            row = entry["title"]
            found += [_panel(row, inner) for inner in entry["panels"]]
        else:
            found.append(_panel(row, entry))
    return found


def _panel(row: str, entry: dict[str, Any]) -> Panel:
    field = entry["fieldConfig"]["defaults"]
    stacking = field.get("custom", {}).get("stacking", {}).get("mode")
    queries = tuple(Query(target["expr"], target["legendFormat"]) for target in entry["targets"])
    texts = (entry["title"], field["unit"], entry["description"])
    return Panel(row, *texts, queries, stacking == "normal")
