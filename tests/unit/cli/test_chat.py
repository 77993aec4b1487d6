"""`specray chat` against a small server with OpenAI's streaming API: requests, output and errors."""

import io
import json
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specray.cli import main as cli
from specray.cli.arguments import server_url
from specray.cli.chat import StreamedAnswer

PIECES = ["Par", "is", "."]
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "speculative": {"verify_steps": 2, "draft_tokens": 4, "accepted_tokens": 1, "accept_length": 1.5},
}


class Handler(BaseHTTPRequestHandler):
    requests: list[dict[str, Any]]
    fails = False
    key: str | None = None  # the one that is required

    def do_GET(self) -> None:
        if self.key is not None and self.headers["Authorization"] != f"Bearer {self.key}":
            self.send_json(401, {"error": {"message": "invalid key", "type": "invalid_request_error", "code": None}})
            return
        self.send_json(
            200, {"object": "list", "data": [{"id": "toy", "object": "model", "created": 0, "owned_by": "x"}]}
        )

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        if self.fails:
            self.send_json(429, {"error": {"message": "the queue is full", "type": "rate_limit", "code": None}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in PIECES]
        reason = "length" if request.get("max_tokens") == USAGE["completion_tokens"] else "stop"
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        for chunk in [*chunks, end, {"choices": [], "usage": USAGE}]:
            head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "toy"}
            self.wfile.write(f"data: {json.dumps({**head, **chunk})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def send_json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.requests, Handler.fails, Handler.key = [], False, None
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def chat(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, typed: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return cli.main(["chat", "--url", f"http://127.0.0.1:{server.server_port}", *options])


def test_a_piped_conversation(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        chat(server, monkeypatch, "Capital of France?\n\nSure?\n", "--temperature", "0", "--system", "Be short.") == 0
    )
    captured = capsys.readouterr()
    assert captured.out == "Paris.\nParis.\n"
    assert "3 tokens" in captured.err
    assert "accept length 1.50" in captured.err
    second = Handler.requests[1]
    assert [message["content"] for message in second["messages"]] == [
        "Be short.",
        "Capital of France?",
        "Paris.",
        "Sure?",
    ]
    assert (second["model"], second["temperature"], second["stream"]) == ("toy", 0.0, True)
    assert "max_tokens" not in second


def test_an_answer_that_its_limit_cuts_says_so(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(server, monkeypatch, "one\n") == 0
    assert "--max-tokens" not in capsys.readouterr().err
    assert chat(server, monkeypatch, "one\n", "--max-tokens", "3") == 0
    assert "accept length 1.50, cut at its limit, which --max-tokens sets]" in capsys.readouterr().err


def test_reset_clears_the_conversation_and_exit_ends_it(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(server, monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n", "--seed", "7", "--model", "mine") == 0
    assert [len(request["messages"]) for request in Handler.requests] == [1, 1]
    assert {(request["seed"], request["model"]) for request in Handler.requests} == {(7, "mine")}


def test_a_refused_question_is_reported_and_removed(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.fails = True
    assert chat(server, monkeypatch, "one\ntwo\n") == 1
    assert capsys.readouterr().err.count("answered 429: ") == 2
    assert [len(request["messages"]) for request in Handler.requests] == [1, 1]


def test_a_server_with_keys_gets_that_of_the_option_or_the_environment(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.key = "secret"
    assert chat(server, monkeypatch, "one\n") == 2
    assert "set SPECRAY_API_KEY or --api-key" in capsys.readouterr().err
    assert chat(server, monkeypatch, "one\n", "--api-key", "secret") == 0
    monkeypatch.setenv("SPECRAY_API_KEY", "secret")
    assert chat(server, monkeypatch, "one\n") == 0


@pytest.mark.parametrize(
    ("undrafted", "ending"),
    [
        ({}, "1.50"),
        ({"limit": 1}, "1.50"),
        ({"limit": 1, "budget": 2}, "1.50, most steps without drafts (budget)"),
    ],
)
def test_an_answer_says_why_most_of_its_steps_had_no_drafts(undrafted: dict[str, int], ending: str) -> None:
    speculative = {"verify_steps": 4, "accept_length": 1.5, "undrafted_steps": undrafted}
    assert StreamedAnswer(usage={"speculative": speculative}).summary().endswith(f"accept length {ending}")


def test_an_answer_without_speculation_has_no_accept_length() -> None:
    answer = StreamedAnswer("x", {"completion_tokens": 4}, seconds=2.0)
    assert answer.summary() == "4 tokens, 2.0 tokens/s"


@pytest.mark.parametrize("text", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/", "a:1"])
def test_an_address_may_be_that_of_the_api(text: str) -> None:
    assert server_url(text) == "http://a:1"


@pytest.mark.parametrize("text", ["ftp://a", "http://", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not the address of a server"):
        server_url(text)
