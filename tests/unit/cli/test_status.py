"""`specray status`: tables from recorded metrics, and the command against a server with recorded answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from specray.cli import main as cli
from specray.cli.status import ServerStatus, as_json, as_text, read_metrics, replica_statuses

# Recorded from a server with n-gram drafts; a second replica was added by hand.
METRICS = """
# TYPE specray_drafter_info gauge
specray_drafter_info{drafter="NGRAM",replica="nrkn9ylc"} 1.0
specray_drafter_info{drafter="none",replica="b"} 0.0
specray_drafter_info{drafter="EAGLE3",replica="b"} 1.0
# TYPE specray_num_requests_running gauge
specray_num_requests_running{replica="nrkn9ylc"} 3.0
specray_num_requests_running{replica="b"} 0.0
# TYPE specray_num_requests_waiting gauge
specray_num_requests_waiting{replica="nrkn9ylc"} 1.0
# TYPE specray_kv_cache_usage_perc gauge
specray_kv_cache_usage_perc{replica="nrkn9ylc"} 0.25
# TYPE specray_generation_tokens_total counter
specray_generation_tokens_total{replica="nrkn9ylc"} 30.0
# TYPE specray_prefix_cache_queries_total counter
specray_prefix_cache_queries_total{replica="nrkn9ylc"} 6.0
# TYPE specray_prefix_cache_hits_total counter
specray_prefix_cache_hits_total{replica="nrkn9ylc"} 3.0
# TYPE specray_verify_steps_total counter
specray_verify_steps_total{replica="nrkn9ylc"} 27.0
# TYPE specray_spec_decode_num_accepted_tokens_total counter
specray_spec_decode_num_accepted_tokens_total{replica="nrkn9ylc"} 2.0
# TYPE specray_drafted_seconds_total counter
specray_drafted_seconds_total{replica="nrkn9ylc"} 14.0
# TYPE specray_drafted_plain_seconds_total counter
specray_drafted_plain_seconds_total{replica="nrkn9ylc"} 21.0
# TYPE specray_draft_faults_total counter
specray_draft_faults_total{kind="nan",replica="nrkn9ylc"} 1.0
specray_draft_faults_total{kind="gone",replica="nrkn9ylc"} 1.0
# TYPE specray_late_drafts_total counter
specray_late_drafts_total{replica="nrkn9ylc"} 7.0
"""
INFO = {
    "model": "smollm2-135m-instruct",
    "tp_size": 2,
    "speculative_algorithm": "NGRAM",
    "num_failovers": 4,
    "draft": {"placement": "colocated"},
    "since_token_s": {"nrkn9ylc": 0.34},
    "rank_nodes": {"nrkn9ylc": ["10.0.0.1", "10.0.0.1", "10.0.0.2"]},
}


def status(at: float, text: str, is_ready: bool = True, info: dict[str, Any] = INFO) -> ServerStatus:
    return ServerStatus(at, is_ready, info, *read_metrics(text))


def later(text: str) -> str:
    """Two seconds later: 20 more tokens in 10 steps, of which 10 were drafts."""
    return text.replace("} 30.0", "} 50.0").replace("} 27.0", "} 37.0").replace("} 2.0", "} 12.0")


def test_a_drafter_that_is_gone_is_shown_with_the_reason() -> None:
    info = INFO | {"absent_drafters": {"nrkn9ylc": "the last drafter died"}}
    now = status(12.0, later(METRICS), info=info)
    text = as_text("http://x", status(10.0, METRICS), now)
    assert "NGRAM (absent)" in text
    assert text.endswith("nrkn9ylc decodes without drafts: the last drafter died")


def test_a_replica_without_the_cpu_kernels_is_shown() -> None:
    absent = later(METRICS) + 'specray_cpu_kernels_absent{replica="nrkn9ylc"} 1.0\n'
    text = as_text("http://x", status(10.0, METRICS), status(12.0, absent))
    assert text.endswith("nrkn9ylc computes without the CPU kernels, several times slower; its log says why")
    assert "kernels" not in as_text("http://x", status(10.0, METRICS), status(12.0, later(METRICS)))


def test_rates_are_since_the_previous_update() -> None:
    second, first = replica_statuses(status(10.0, METRICS), status(12.0, later(METRICS)))
    assert (first.replica, first.drafter, first.num_running, first.num_waiting) == ("nrkn9ylc", "NGRAM", 3, 1)
    assert first.tokens_per_s == 10.0
    assert first.accept_length == 2.0
    assert first.accept_length_overall == pytest.approx(1 + 12 / 37)
    assert (first.kv_usage, first.cache_hit_rate, first.num_draft_faults, first.since_token_s) == (0.25, 0.5, 2, 0.34)
    assert first.num_late_drafts == 7
    assert (second.drafter, second.accept_length, second.cache_hit_rate, second.since_token_s) == (
        "EAGLE3",
        None,
        None,
        None,
    )


def test_rates_of_a_new_replica_are_since_its_start() -> None:
    _, row = replica_statuses(status(10.0, ""), status(12.0, METRICS))
    assert row.tokens_per_s == 15.0


def test_the_tables_have_a_line_per_replica() -> None:
    text = as_text("http://here", status(10.0, METRICS), status(12.0, later(METRICS)))
    assert max(map(len, text.splitlines())) <= 100
    headline, load, drafts = text.split("\n\n")
    assert headline.replace("\n", " ") == (
        "http://here: ready; smollm2-135m-instruct, NGRAM, drafters colocated, 2 engines with tp_size 2, 4 failovers"
    )
    cells: dict[str, str] = {}
    for table in (load, drafts):
        titles, _, b, a = table.splitlines()
        assert b.startswith("| b ")
        pairs = zip(*([part.strip() for part in line.strip("|").split("|")] for line in (titles, a)), strict=True)
        cells |= dict(pairs)
    assert cells == {
        "replica": "nrkn9ylc",
        "ranks": "0, 1 on 10.0.0.1; 2 on 10.0.0.2",
        "drafter": "NGRAM",
        "last token": "0.3 s ago",
        "running": "3",
        "queued": "1",
        "tokens/s": "10.0",
        "accept len": "2.00",
        "overall": "1.32",
        "KV used": "25%",
        "cache hits": "50%",
        "speedup": "1.50",
        "faults": "2",
        "preempted": "0",
    }


def test_json_output_is_one_line() -> None:
    text = as_json("http://here", status(10.0, METRICS), status(12.0, later(METRICS)))
    assert "\n" not in text
    output = json.loads(text)
    assert (output["ready"], output["failovers"]) == (True, 4)
    assert output["replicas"][1]["tokens_per_s"] == 10.0


def test_a_server_without_engines_is_not_ready() -> None:
    nothing = status(10.0, "", is_ready=False, info={})
    assert "NOT READY" in as_text("http://here", nothing, nothing)
    assert "no engine is connected" in as_text("http://here", nothing, nothing)


class RecordedAnswers(BaseHTTPRequestHandler):
    """Answers by path; 503 for other paths."""

    answers: ClassVar[dict[str, str]] = {}
    keys: ClassVar[set[str | None]] = {None}

    def do_GET(self) -> None:
        key = self.headers.get("authorization")
        answer = self.answers.get(self.path)
        status = 401 if key not in self.keys else 503 if answer is None else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(
        RecordedAnswers, "answers", {"/metrics": METRICS, "/server_info": json.dumps(INFO), "/readyz": "{}"}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), RecordedAnswers) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def once(url: str, *options: str) -> int:
    return cli.main(["status", "--url", url, "--once", "--interval", "0.01", *options])


def test_once_prints_the_tables_once(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert once(server) == 0
    assert "| nrkn9ylc | 0, 1 on 10.0.0.1; 2 on 10.0.0.2 |" in capsys.readouterr().out


def test_once_exits_with_status_1_while_the_server_is_not_ready(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RecordedAnswers, "answers", {})
    assert once(server, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"url": server, "ready": False, "failovers": None, "replicas": []}


def test_the_key_from_the_environment_is_sent(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RecordedAnswers, "keys", {"Bearer secret"})
    assert once(server) == 2
    assert "set SPECRAY_API_KEY or --api-key to a valid key" in capsys.readouterr().err
    assert once(server, "--api-key", "secret") == 0
    monkeypatch.setenv("SPECRAY_API_KEY", "secret")
    assert once(server) == 0
    assert once(server, "--api-key", "wrong") == 2
