"""The dashboard and the alert rules fit their programs, their expressions are valid, and their metrics exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from specray.dashboard.panels import DASHBOARD, Panel, Query, panels
from specray.dashboard.png import MAIN_ROWS
from specray.metrics import METRICS

FOLDER = DASHBOARD.parent
DOCUMENT = json.loads(DASHBOARD.read_text())
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]}
RAYS_EXPORTERS = "/tmp/ray/prom_metrics_service_discovery.json"
PREFIX = "ray_"  # added by Ray to each name
RAY_METRICS = {
    "ray_node_cpu_utilization",
    "ray_node_mem_total",
    "ray_node_mem_used",
    "ray_serve_deployment_replica_healthy",
    "ray_serve_deployment_replica_starts_total",
    "ray_serve_num_http_error_requests_total",
}
PANELS = panels()
QUERIES = [query for panel in PANELS for query in panel.queries]
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
OURS = {
    f"{PREFIX}{metric.name}{part}"
    for metric in METRICS
    for part in (HISTOGRAM_PARTS if metric.kind == "histogram" else ("",))
}
LABELS = {"replica", "application", "deployment", "instance", "error_code"}  # of Ray, Serve and Prometheus
LABELS |= {metric.label or "le" for metric in METRICS}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """The series that an expression reads."""
    found: list[promql_parser.VectorSelector] = []

    def note(node: Any) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    each_node(promql_parser.parse(expression), note)
    return found


def each_node(node: Any, do: Any) -> None:
    do(node)
    parts: Iterable[Any] = (getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param"))
    for part in (*parts, *getattr(node, "args", ())):
        if part is not None:
            each_node(part, do)


def test_the_dashboard_has_only_panel_types_of_grafana() -> None:
    encoded = JSONEncoder(sort_keys=True).encode(Dashboard.from_json(DOCUMENT))
    assert json.loads(encoded) == DOCUMENT


def test_panels_fill_the_grid_without_overlap() -> None:
    entries = [inner for entry in DOCUMENT["panels"] for inner in (entry, *entry.get("panels", []))]
    places = [entry["gridPos"] for entry in entries]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({entry["id"] for entry in entries}) == len(places)


def test_the_first_rows_are_open_and_the_others_hold_their_panels() -> None:
    rows = [entry for entry in DOCUMENT["panels"] if entry["type"] == "row"]
    assert [row["title"] for row in rows if not row["collapsed"]] == ["Overview", "Speculation"]
    assert [bool(row["panels"]) for row in rows] == [row["collapsed"] for row in rows]
    assert {row["title"] for row in rows} >= MAIN_ROWS


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.legend)
def test_every_series_of_ours_is_that_of_the_selected_engines(query: Query) -> None:
    for selector in selectors(query.expression.replace("$__rate_interval", "1m")):
        chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers if "$" in matcher.value}
        both = {"application": "$application", "replica": "$replica"}
        is_ours = (selector.name or "").startswith(f"{PREFIX}specray_")
        assert chosen == both if is_ours else chosen.items() <= both.items()


def test_variables_list_what_engines_have() -> None:
    names = [variable["name"] for variable in DOCUMENT["templating"]["list"]]
    assert names == ["datasource", "application", "replica"]
    for variable in DOCUMENT["templating"]["list"][1:]:
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")


def test_titles_are_unique() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_has_a_description(panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert f"**{panel.title}**" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.legend)
def test_metrics_of_an_expression_exist(query: Query) -> None:
    names = {selector.name for selector in selectors(query.over("1m"))}
    assert names
    assert names <= OURS | RAY_METRICS


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.legend)
def test_labels_of_an_expression_exist(query: Query) -> None:
    grouped = re.findall(r"(?:by|on|group_left) \(([^)]*)\)", query.expression)
    matched = re.findall(r"(\w+)=", query.expression)
    named = re.findall(r"\{\{(\w+)\}\}", query.legend)
    assert {*matched, *named, *(label for group in grouped for label in group.split(", ") if label)} <= LABELS


@pytest.mark.parametrize("name", ALERTS)
def test_metrics_of_an_alert_exist(name: str) -> None:
    assert {selector.name for selector in selectors(ALERTS[name]["expr"])} <= OURS | RAY_METRICS


def test_every_metric_of_ray_is_used() -> None:
    used = {selector.name for query in QUERIES for selector in selectors(query.over("1m"))}
    assert used >= RAY_METRICS


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules(tmp_path: Path) -> None:
    """With a list of exporters in place of the one that a Ray cluster writes, which this machine may never have had."""
    exporters = tmp_path / "exporters.json"
    exporters.write_text('[{"labels": {"job": "ray"}, "targets": ["127.0.0.1:8080"]}]')
    text = (FOLDER / "prometheus.yaml").read_text(encoding="utf-8")
    assert RAYS_EXPORTERS in text
    (tmp_path / "alerts.yaml").write_bytes((FOLDER / "alerts.yaml").read_bytes())
    (tmp_path / "prometheus.yaml").write_text(text.replace(RAYS_EXPORTERS, str(exporters)))
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus.yaml"))
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "alerts.yaml")


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f'ray_specray_{name}{{replica="r1", application="a"{labels}}}', "values": values}


ERRORS = ', finished_reason="error"'
STOPS = ', finished_reason="stop"'
PLAIN = ', drafter="none"'


def requests(running: int, waiting: int) -> list[dict[str, str]]:
    return [series("num_requests_running", f"{running}+0x40"), series("num_requests_waiting", f"{waiting}+0x40")]


def tokens(running: int, a_minute: int) -> list[dict[str, str]]:
    return [series("num_requests_running", f"{running}+0x40"), series("generation_tokens_total", f"50+{a_minute}x40")]


def drafts(a_minute: int, is_collapsed: bool) -> list[dict[str, str]]:
    return [
        series("acceptance_collapsed", f"{int(is_collapsed)}+0x40", ', drafter="head"'),
        series("acceptance_collapsed", "0+0x40", ', drafter="other"'),
        series("spec_decode_num_drafts_total", f"0+{a_minute}x40"),
    ]


def trees(drafter: str, a_minute: int) -> dict[str, str]:
    """Those of one of several drafters."""
    return series("drafter_verify_steps_total", f"0+{a_minute}x40", f', drafter="{drafter}"')


def shadow(gain_lower_bound: float, trees_a_minute: int) -> list[dict[str, str]]:
    new = ', drafter="new"'
    return [
        series("shadow_gain_lower_bound", f"{gain_lower_bound}+0x40", new),
        series("shadow_trees_total", f"0+{trees_a_minute}x40", new),
    ]


# Alert, series with a value a minute, whether it fires after half an hour.
CASES = [
    ("SpecRayDraftsRefused", drafts(60, is_collapsed=True), True),
    ("SpecRayDraftsRefused", drafts(60, is_collapsed=False), False),
    ("SpecRayDraftsRefused", drafts(0, is_collapsed=True), False),
    ("SpecRayDraftsRefused", [*drafts(60, is_collapsed=True), trees("head", 60), trees("other", 0)], True),
    ("SpecRayDraftsRefused", [*drafts(60, is_collapsed=True), trees("head", 0), trees("other", 60)], False),
    ("SpecRayShadowIsBetter", shadow(0.1, 60), True),
    ("SpecRayShadowIsBetter", shadow(-0.1, 60), False),
    ("SpecRayShadowIsBetter", shadow(0.1, 0), False),
    ("SpecRayQueueLong", requests(4, 9), True),
    ("SpecRayQueueLong", requests(4, 3), False),
    ("SpecRayRefusing", [series("requests_refused_total", "0+1x40")], True),
    ("SpecRayRefusing", [series("requests_refused_total", "7+0x40")], False),
    ("SpecRayPoisonRequest", [series("poison_requests_total", "0+0x20 1+0x19")], True),
    ("SpecRayPoisonRequest", [series("poison_requests_total", "2+0x40")], False),
    ("SpecRayAuditMismatch", [series("audit_mismatches_total", "0+0x20 1+0x19", PLAIN)], True),
    ("SpecRayAuditMismatch", [series("audit_mismatches_total", "2+0x40", PLAIN)], False),
    ("SpecRayNoCpuKernels", [series("cpu_kernels_absent", "1+0x40")], True),
    ("SpecRayNoCpuKernels", [series("cpu_kernels_absent", "0+0x40")], False),
    ("SpecRayStalled", tokens(1, 0), True),
    ("SpecRayStalled", tokens(1, 9), False),
    ("SpecRayStalled", tokens(0, 0), False),
    ("SpecRayErrors", [series("request_finished_total", "0+0x27 1+0x9", ERRORS)], True),
    ("SpecRayErrors", [series("request_finished_total", "0+5x40", STOPS)], False),
    ("SpecRayNoEngine", [series("drafter_info", "1+0x24 stale", PLAIN)], True),
    ("SpecRayNoEngine", [series("drafter_info", "1+0x40", PLAIN)], False),
]


def test_every_alert_has_test_cases() -> None:
    assert {(name, fires) for name, _, fires in CASES} == {(name, fires) for name in ALERTS for fires in (True, False)}


@needs_promtool
@pytest.mark.parametrize(("name", "data", "fires"), CASES)
def test_alerts_fire_only_when_they_should(name: str, data: list[dict[str, str]], fires: bool, tmp_path: Path) -> None:
    expression = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    play(tmp_path, data, expression, {"{}": 1.0} if fires else {})


def two_engines() -> list[dict[str, str]]:
    """r0 drafts trees of 7 tokens with NGRAM, of which 2 are accepted; r1 does not draft. Their steps take a second.

    r0 had another drafter before.
    """
    counts = {  # a minute, of r0 and of r1
        "verify_steps_total": (60, 60),
        "spec_decode_num_draft_tokens_total": (420, 0),
        "spec_decode_num_accepted_tokens_total": (120, 0),
        'step_seconds_total{phase="forward"}': (45, 60),
        'step_seconds_total{phase="draft"}': (15, 0),
        "drafted_plain_seconds_total": (30, 12),
        "drafted_seconds_total": (20, 12),
    }
    data = [{"series": 'ray_specray_drafter_info{replica="r0", drafter="EAGLE"}', "values": "0+0x40"}]
    for number, drafter in enumerate(("NGRAM", "none")):
        data.append(
            {"series": f'ray_specray_drafter_info{{replica="r{number}", drafter="{drafter}"}}', "values": "1+0x40"}
        )
        for series_name, growth in counts.items():
            name, _, label = series_name.rstrip("}").partition("{")
            labels = ", ".join(filter(None, [f'replica="r{number}"', label]))
            data.append({"series": f"ray_specray_{name}{{{labels}}}", "values": f"0+{growth[number]}x40"})
    return data


@needs_promtool
@pytest.mark.parametrize(
    ("title", "legend", "of_ngram", "of_plain"),
    [
        ("Accept length by drafter", "{{drafter}}", 3.0, 1.0),
        ("Wasted verify tokens", "{{drafter}}", 5.0, 0.0),
        ("Speed-up over plain", "{{drafter}}", 1.5, 1.0),
    ],
)
def test_panels_distinguish_engines_by_their_drafters(
    title: str, legend: str, of_ngram: float, of_plain: float, tmp_path: Path
) -> None:
    panel = next(panel for panel in PANELS if panel.title == title)
    query = next(query for query in panel.queries if query.legend == legend)
    expected = {'{drafter="NGRAM"}': of_ngram, '{drafter="none"}': of_plain}
    play(tmp_path, two_engines(), f"round({query.over('5m')}, {2**-10})", expected)  # promtool compares to the last bit


def play(folder: Path, data: list[dict[str, str]], expression: str, expected: dict[str, float]) -> None:
    """Check an expression's samples after half an hour of series with one value per minute."""
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    question = {"expr": expression, "eval_time": "30m", "exp_samples": samples}
    test = {"interval": "1m", "input_series": data, "promql_expr_test": [question]}
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def promtool(*arguments: str) -> str:
    ended = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
