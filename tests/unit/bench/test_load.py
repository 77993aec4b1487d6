"""`specray load` against scripted servers."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from random import Random

import pytest

from specray.bench.exchange import exchange, request_bytes
from specray.bench.open_loop import arrivals
from specray.cli import main as cli
from specray.cli.arguments import KEY_VARIABLE

Reply = tuple[int, dict[str, str], bytes]
IDLE = b"specray_num_requests_running 0.0\nspecray_kv_cache_usage_perc 0.0\n"


@contextmanager
def serving(answer: Callable[[int, str | None], Reply], metrics_status: int = 200) -> Iterator[str]:
    """A server that answers its nth request, with an idle engine's metrics."""
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(metrics_status, {}, IDLE)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.reply(*answer(next(numbers), self.headers.get("authorization")))

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


ARGUMENTS = ["load", "--rate", "100", "--seconds", "0.3", "--whole"]


def test_every_request_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(good) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 0
    cells = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    figures = {name.strip(): value.strip() for name, value in cells}
    sent = int(figures["sent"])
    assert sent > 10
    assert (int(figures["complete"]), int(figures["refused"])) == (-(-sent // 2), sent // 2)
    assert int(figures["status 200"]) + int(figures["status 429"]) == sent
    assert figures["refusal p99"].endswith(" ms")


def test_a_stream_without_an_end_is_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(silent) as url:
        assert cli.main([*ARGUMENTS, "--url", url]) == 1
    assert "the stream stopped without [DONE] or an error" in capsys.readouterr().out


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
