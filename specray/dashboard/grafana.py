"""The panels as a Grafana dashboard, through Grafana's SDK, which is optional."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from specray.dashboard.panels import ROWS, Panel
from specray.errors import ConfigError

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import timeseries
    from grafana_foundation_sdk.models.dashboard import Dashboard, DataSourceRef

UID = "specray"
DATASOURCE = "datasource"  # a dashboard variable, so that any Prometheus can be chosen
PANEL_HEIGHT, PANEL_WIDTH = 8, 8  # of a grid 24 wide
FILL_PERCENT = 60  # of stacked areas


def dashboard_json() -> str:
    """The file's text; deterministic. ConfigError if the SDK is not installed."""
    try:
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs Grafana's SDK ({error}); run `pip install specray[dashboard]`"
        ) from None
    return JSONEncoder(sort_keys=True, indent=2).encode(build()) + "\n"


def build() -> "Dashboard":
    from grafana_foundation_sdk.builders import dashboard

    ids = count(1)
    builder = (
        dashboard.Dashboard("SpecRay")
        .uid(UID)
        .description("Speculative decoding on Ray. Made by `specray dashboard --write`; edits here would be lost.")
        .tags(["specray"])
        .time("now-30m", "now")
        .refresh("10s")  # the interval of Ray's metrics
        .with_variable(dashboard.DatasourceVariable(DATASOURCE).label("Prometheus").type("prometheus"))
    )
    for row in ROWS:
        builder.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder.with_panel(_panel(panel).id(next(ids)))
    return builder.build()


def _panel(panel: Panel) -> "timeseries.Panel":
    from grafana_foundation_sdk.builders import common, prometheus, timeseries
    from grafana_foundation_sdk.models.common import StackingMode

    source = _datasource()
    builder = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(source)
        .height(PANEL_HEIGHT)
        .span(PANEL_WIDTH)
    )
    if panel.unit == "percentunit":
        builder.min(0).max(1)
    if panel.stacked:
        builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(FILL_PERCENT)
    for name, query in zip(_ref_ids(), panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        builder.with_target(target.ref_id(name).datasource(source).range())
    return builder


def _datasource() -> "DataSourceRef":
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid=f"${{{DATASOURCE}}}")


def _ref_ids() -> Iterator[str]:
    """A, B, C, …: Grafana's names of a panel's queries."""
    return map(chr, count(ord("A")))
