"""The text of the panels' expressions. tests/cluster/test_dashboard.py tests them on live data."""

from specray.dashboard.panels import WINDOW, Query, accept_length, rate


def test_a_counter_is_summed_by_labels() -> None:
    assert rate("specray_steps_total", "replica") == f"sum by (replica) (rate(ray_specray_steps_total[{WINDOW}]))"


def test_the_drafter_is_joined_by_replica() -> None:
    joined = rate("specray_steps_total", "drafter, replica", '{a="b"}', "1m")
    assert joined == (
        'sum by (drafter, replica) (rate(ray_specray_steps_total{a="b"}[1m])'
        " * on (replica) group_left (drafter) (ray_specray_drafter_info == 1))"
    )


def test_a_query_has_a_window() -> None:
    query = Query(accept_length("replica"), "{{replica}}")
    assert query.over("5m") == accept_length("replica", window="5m")


def test_a_legend_has_its_labels_filled_in() -> None:
    query = Query("x", "{{drafter}} depth 1 of {{replica}}")
    assert query.name({"drafter": "EAGLE3", "replica": "r1"}) == "EAGLE3 depth 1 of r1"
    assert query.name({"replica": "r1"}) == " depth 1 of r1"
