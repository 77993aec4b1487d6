"""`specray dashboard`: the files, the picture from a scripted Prometheus, and errors."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from specray.cli import main as cli
from specray.dashboard import png
from specray.dashboard.panels import panels
from specray.dashboard.query import query_range
from specray.errors import ConfigError


class Prometheus(BaseHTTPRequestHandler):
    """Answers every query with `series`, whose second point is NaN."""

    series: tuple[str, ...] = ()
    labels: dict[str, str]
    asked: list[dict[str, str]]

    def do_GET(self) -> None:
        question = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.asked.append(question)
        start, step = float(question["start"]), float(question["step"])
        points = [[start, "1.5"], [start + step, "NaN"], [start + 2 * step, "2"]]
        result = [{"metric": {"phase": name, "drafter": name} | self.labels, "values": points} for name in self.series]
        is_wrong = question["query"] == "wrong("
        self.send_response(400 if is_wrong else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"error": "parse error"} if is_wrong else {"data": {"result": result}}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[type[Prometheus]]:
    handler: Any = type("Handler", (Prometheus,), {"series": ("host", "draft"), "labels": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["dashboard", "--help"])
    assert "usage: specray dashboard" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--write", "x", "--png", "y"], ["--png", "y", "--minutes", "0"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["dashboard", *arguments])
    assert "error:" in capsys.readouterr().err


def test_write_makes_all_files(tmp_path: Path) -> None:
    assert cli.main(["dashboard", "--write", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"specray.json", "alerts.yaml", "prometheus.yaml"}


def test_points_that_are_not_numbers_are_left_out(prometheus: Any) -> None:
    first, _ = query_range(prometheus.url, "up", 100.0, 130.0, 10.0)
    assert first.labels == {"phase": "host", "drafter": "host"}
    assert first.times == [100.0, 120.0]
    assert first.values == [1.5, 2.0]


def test_the_main_panels_are_drawn(prometheus: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert cli.main(["dashboard", "--png", str(path), "--prometheus", prometheus.url, "--minutes", "2"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert all("$" not in question["query"] for question in prometheus.asked)
    assert float(prometheus.asked[0]["end"]) - float(prometheus.asked[0]["start"]) == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("minutes", "seconds"), [(1, 10), (5, 60), (15, 300), (60, 600), (240, 3600), (60 * 24 * 60, 60 * 60 * 24 * 60)]
)
def test_the_clock_has_round_marks(minutes: int, seconds: int) -> None:
    assert png._tick_seconds(60 * minutes) == seconds


def test_the_picture_names_the_application_and_the_time(
    prometheus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda _, text: titles.append(text))
    png.save_png(tmp_path / "x.png", prometheus.url, 0.0, 60.0)
    assert re.fullmatch(r"SpecRay http://\S+, \d\d \w+ \d{4}, \d\d:\d\d:\d\d to \d\d:\d\d:\d\d \(.+\)", titles[0])
    prometheus.labels = {"application": "chat"}
    png.save_png(tmp_path / "x.png", prometheus.url, 0.0, 60.0)
    assert titles[1].startswith("SpecRay chat, ")


def test_curves_of_unequal_length_are_stacked(tmp_path: Path) -> None:
    panel = next(panel for panel in panels() if panel.is_stacked)
    curves = {
        "host": png.Series({}, [0.0, 1.0], [1.0, 2.0]),
        "draft": png.Series({}, [1.0], [3.0]),
    }
    png._draw(tmp_path / "stack.png", "app", [(panel, curves), (panel, {})], (0.0, 60.0))
    assert (tmp_path / "stack.png").is_file()


@pytest.mark.parametrize(
    ("question", "message"), [("wrong(", "rejects the query.*parse error"), (None, "no Prometheus answers at")]
)
def test_a_prometheus_that_does_not_answer_is_named(prometheus: Any, question: str | None, message: str) -> None:
    url = prometheus.url if question else "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=message):
        query_range(url, question or "up", 0.0, 10.0, 1.0)


def test_no_data_is_an_error(prometheus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prometheus.series = ()
    assert cli.main(["dashboard", "--png", str(tmp_path / "x.png"), "--prometheus", prometheus.url]) == 2
    assert "does it scrape Ray's nodes" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install specray\[dashboard\]"):
        png._draw(Path("x.png"), "app", [], (0.0, 60.0))
