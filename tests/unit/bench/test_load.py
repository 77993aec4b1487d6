"""`specray load` against scripted servers."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specray.bench.exchange import exchange, request_bytes
from specray.bench.open_loop import arrivals
from specray.cli import main as cli
from specray.cli.arguments import KEY_VARIABLE
from tests.support.processes import TIMEOUT_S, wait_until

Reply = tuple[int, dict[str, str], bytes]
IDLE = b"specray_num_requests_running 0.0\nspecray_kv_cache_usage_perc 0.0\n"


Answer = Callable[[int, str | None], Reply | Iterator[tuple[float, Any]]]


@contextmanager
def serving(answer: Answer, metrics_status: int = 200, bodies: list[Any] | None = None) -> Iterator[str]:
    """A server that answers its nth request, with an idle engine's metrics.

    An answer is a reply, or the events of a stream, each after some seconds. The requests are added to `bodies`.
    """
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(metrics_status, {}, IDLE)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if bodies is not None:
                bodies.append(json.loads(body))
            reply = answer(next(numbers), self.headers.get("authorization"))
            if isinstance(reply, tuple):
                self.reply(*reply)
            else:
                self.stream(reply)

        def stream(self, events: Iterator[tuple[float, Any]]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            with suppress(ConnectionError):
                for pause, event in events:
                    time.sleep(pause)
                    self.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.send_chunk(b"data: [DONE]\n\n")
                self.send_chunk(b"")

        def send_chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in ({"content-length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def good(number: int, _: str | None) -> Reply:
    if number % 2:
        return 429, {"content-type": "application/json", "retry-after": "1"}, json.dumps({"error": {}}).encode()
    body = {"choices": [{"index": 0, "text": "abc"}], "usage": {"completion_tokens": 3}}
    return 200, {"content-type": "application/json"}, json.dumps(body).encode()


def silent(number: int, key: str | None) -> Reply:
    """A server whose streams stop without an end."""
    if number < 3:
        return good(0, key)
    return 200, {"content-type": "text/event-stream"}, b'data: {"choices": []}\n\n'


def chunks(_number: int, _: str | None) -> Iterator[tuple[float, Any]]:
    """An opening without text, the first token after 0.1 s, two more together after 0.1 s, and two after 0.2 s."""
    yield 0.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    for pause, text in ((0.1, "a"), (0.1, "bc"), (0.2, "de")):
        yield pause, {"choices": [{"index": 0, "delta": {"content": text}}]}
    yield 0.0, {"choices": [], "usage": {"completion_tokens": 5}}


ARGUMENTS = ["load", "--rate", "100", "--seconds", "0.3", "--whole"]


def figures(output: str) -> dict[str, list[str]]:
    """The cells of each row that is printed, by its first cell."""
    rows = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}


def test_every_request_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(good) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 0
    seen = figures(capsys.readouterr().out)
    sent = int(seen["sent"][0])
    assert sent > 10
    assert (int(seen["complete"][0]), int(seen["refused"][0])) == (-(-sent // 2), sent // 2)
    assert int(seen["status 200"][0]) + int(seen["status 429"][0]) == sent
    assert seen["refusal p99"][0].endswith(" ms")
    assert seen["whole request"][0] == seen["complete"][0]


def test_a_stream_without_an_end_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(silent) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 1
    assert "the stream stopped without [DONE] or an error" in capsys.readouterr().err


@pytest.mark.parametrize("status", [400, 404, 500])
def test_requests_that_end_with_an_error_are_a_failure(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "no such model"}}, {"content-type": "application/json"}
    with serving(lambda *_: (status, error[1], json.dumps(error[0]).encode())) as url:
        assert cli.main([*ARGUMENTS, "--url", f"{url}/v1/"]) == 1
    shown = capsys.readouterr()
    sent = figures(shown.out)["error"][0]
    assert f"error: {sent} of {sent} requests failed: {sent} x status {status}: no such model" in shown.err


def test_a_server_that_refuses_everything_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda *_: good(1, None)) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 1
    assert "the server refused all" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(good) as url:
        pass
    assert cli.main([*ARGUMENTS, "--url", url]) == 2
    assert f"no server answers at {url}" in capsys.readouterr().err


def test_latencies_are_those_of_the_streams_chunks(tmp_path: Path) -> None:
    """A step may generate several tokens, which come in one chunk."""
    out, plot = tmp_path / "new" / "load.json", tmp_path / "load.png"
    with serving(chunks) as url:
        arguments = ["load", "--rate", "20", "--seconds", "0.5", "--url", url, "--json", str(out), "--plot", str(plot)]
        assert cli.main(arguments) == 0
    found = json.loads(out.read_text())
    medians = {name: quantiles["p50"] for name, quantiles in found["latency_s"].items()}
    assert medians["first token"] == pytest.approx(0.1, abs=0.05)
    assert medians["between tokens"] == pytest.approx(0.3 / 4, abs=0.03)
    assert {round(gap, 1) for each in found["each"] for gap in gaps(each["token_times"])} == {0.1, 0.2}
    assert medians["whole request"] == pytest.approx(0.4, abs=0.1)
    assert found["requests"]["complete"] == found["requests"]["sent"] == len(found["each"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_the_turns_of_a_data_set_follow_the_answers(tmp_path: Path) -> None:
    rows = [{"turns": ["one", "two"]}, {"prompt": "three"}]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bodies: list[Any] = []
    with serving(lambda *_: good(0, None), bodies=bodies) as url:
        options = ["--dataset", str(tmp_path / "set.jsonl"), "--turns", "2", "--model", "m"]
        assert cli.main([*ARGUMENTS, "--url", url, *options]) == 0
    asked = {json.dumps([message["content"] for message in body["messages"]]) for body in bodies}
    assert asked == {'["one"]', '["one", "abc", "two"]', '["three"]'}
    assert {body["model"] for body in bodies} == {"m"}


def test_ctrl_c_ends_the_open_requests_and_prints_the_figures_so_far() -> None:
    bodies: list[Any] = []

    def slow(number: int, _: str | None) -> Reply | Iterator[tuple[float, Any]]:
        return iter([(0.0, {"choices": []}), (20.0, {})]) if number else good(0, None)

    with serving(slow, bodies=bodies) as url:
        command = [sys.executable, "-m", "specray.cli.main", "load", "--rate", "20", "--seconds", "30", "--url", url]
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of shells ignore it
        load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        try:
            wait_until(lambda: len(bodies) >= 3)
            load.send_signal(signal.SIGINT)
            out, err = load.communicate(timeout=TIMEOUT_S)
        finally:
            load.kill()
    assert load.returncode == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    seen = figures(out)
    assert int(seen["sent"][0]) == int(seen["complete"][0]) + int(seen["aborted"][0])
    assert int(seen["aborted"][0]) >= 2


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []

    def note(number: int, key: str | None) -> Reply:
        keys.append(key)
        return good(2 * number, key)

    monkeypatch.setenv(KEY_VARIABLE, "k" * 20)
    with serving(note) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 0
    assert set(keys) == {f"Bearer {'k' * 20}"}


def test_a_server_that_requires_a_key_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def note(number: int, _: str | None) -> Reply:
        asked.append(number)
        return good(number, None)

    with serving(note, metrics_status=401) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 2
    assert f"{url} requires a key; set {KEY_VARIABLE} or --api-key" in capsys.readouterr().err
    assert not asked


def test_an_exchange_is_cut_at_the_given_byte() -> None:
    with serving(lambda *_: good(0, None)) as url:
        request = request_bytes(f"{url}/v1/completions", {"prompt": "a"})
        whole = asyncio.run(exchange(url, request))
        assert (whole.status, whole.is_whole, whole.was_cut) == (200, True, False)
        for cut_at in (0, 5, len(request), len(request) + 20):
            part = asyncio.run(exchange(url, request, cut_at=cut_at))
            assert (part.status, part.was_cut) == (None, True)
        part = asyncio.run(exchange(url, request, cut_at=len(request) + 150))
        assert (part.status, part.was_cut, part.is_whole) == (200, True, False)
        late = asyncio.run(exchange(url, request, cut_at=10**6))
        assert (late.body, late.was_cut) == (whole.body, False)
        slow = asyncio.run(exchange(url, request, timeout_s=0.3, read_bytes_per_s=1.0))
        assert slow.was_cut


def test_a_refused_connection_is_an_error_of_the_exchange() -> None:
    with serving(good) as url:
        pass
    assert asyncio.run(exchange(url, b"")).error


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(50.0, 100.0, Random(1))
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert 4700 < len(times) < 5300
    gaps = [after - before for before, after in pairwise(times)]
    assert 0.3 < sum(gap < 0.01 for gap in gaps) / len(gaps) < 0.5  # 1 - exp(-1/2) = 0.39


@pytest.mark.parametrize("wrong", [["--rate", "0"], ["--seconds", "-1"], ["--cut", "1.1"], ["--max-tokens", "0"]])
def test_impossible_loads_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["load", *wrong])
