"""A real Prometheus scrapes a serving cluster: every expression of the dashboard has data, and panels can be drawn."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specray.cli.local_server import free_port
from specray.dashboard.panels import DASHBOARD, Query, panels
from specray.dashboard.png import save_png
from specray.dashboard.query import Series, query_range
from specray.errors import ConfigError

FOLDER = DASHBOARD.parent
# This cluster's engines have a single drafter.
QUERIES = [query for panel in panels() if panel.row != "Several drafters" for query in panel.queries]
WINDOW = "1m"
DATA_TIMEOUT_S = 120.0  # Ray sends metrics every ten seconds, and a rate needs two values

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@pytest.fixture(scope="module")
def prometheus(app: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: ARG001  # Ray runs
    """The URL of a Prometheus with our rules that scrapes this Ray cluster on loopback."""
    import ray

    folder = tmp_path_factory.mktemp("prometheus")
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "2s"
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    config["scrape_configs"] = [{"job_name": "ray", "static_configs": [{"targets": targets}]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        wait_until_it_answers(f"http://{address}", folder / "log")
        yield f"http://{address}"
        process.terminate()


@pytest.fixture(scope="module")
def answers(app: Any, prometheus: str) -> dict[Query, list[Series]]:
    """Each query's series, once all have data or a time limit has passed, under a few requests."""
    start = time.time()
    found: dict[Query, list[Series]] = {query: [] for query in QUERIES}
    assert app.http.get("/v2").status_code == 404  # an HTTP error to count
    while not all(found.values()) and time.time() - start < DATA_TIMEOUT_S:
        for _ in range(5):
            app.complete("a b a b a b", max_tokens=60, temperature=0)
            time.sleep(0.5)
        now = time.time()
        found = {query: query_range(prometheus, query.over(WINDOW), start, now, 2.0) for query in QUERIES}
    return found


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.legend)
def test_every_expression_gives_data(query: Query, answers: dict[Query, list[Series]]) -> None:
    assert answers[query], query.over(WINDOW)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.legend)
def test_curves_have_the_labels_of_their_legends(query: Query, answers: dict[Query, list[Series]]) -> None:
    for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
        assert all(series.labels.get(label) for series in answers[query])


def test_the_values_are_those_of_drafting(answers: dict[Query, list[Series]]) -> None:
    accept_length = next(
        series
        for query in QUERIES
        if query.legend == "{{drafter}}" and "drafted_plain" not in query.expression
        for series in answers[query]
    )
    assert accept_length.labels == {"drafter": "NGRAM"}
    assert max(accept_length.values) > 1
    (speedup,) = (series for query in QUERIES if "drafted_plain" in query.expression for series in answers[query])
    assert 0 < speedup.values[-1] <= 2 * max(accept_length.values)


@pytest.mark.usefixtures("answers")
def test_no_alert_fires_on_a_healthy_cluster(prometheus: str) -> None:
    now = time.time()
    assert not query_range(prometheus, 'ALERTS{alertstate="firing"}', now - 60, now, 2.0)


@pytest.mark.usefixtures("answers")
def test_the_main_panels_are_drawn(prometheus: str, tmp_path: Path) -> None:
    now = time.time()
    save_png(tmp_path / "main.png", prometheus, now - 60, now)
    assert (tmp_path / "main.png").stat().st_size > 50_000


def wait_until_it_answers(url: str, log: Path) -> None:
    for _ in range(100):
        try:
            query_range(url, "vector(1)", 0.0, 1.0, 1.0)
        except ConfigError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"Prometheus did not start: {log.read_text()}")
