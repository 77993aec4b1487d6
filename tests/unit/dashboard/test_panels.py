"""Queries of the panels. tests/cluster/test_dashboard.py tests them on live data."""

from specray.dashboard.panels import Query


def test_a_query_over_a_window_has_no_variables_of_grafana() -> None:
    query = Query('rate(a{application=~"$application", replica=~"$replica"}[$__rate_interval])', "{{replica}}")
    assert query.over("5m") == 'rate(a{application=~".*", replica=~".*"}[5m])'


def test_a_legend_has_its_labels_filled_in() -> None:
    query = Query("x", "{{drafter}} depth 1 of {{replica}}")
    assert query.name({"drafter": "EAGLE3", "replica": "r1"}) == "EAGLE3 depth 1 of r1"
    assert query.name({"replica": "r1"}) == " depth 1 of r1"
