"""Runs a program, and records what it sends to the server and what it gets. Standard library only, as `report`."""

import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

_OWN_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


def run_program(command: list[str], home: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with `home` as its folder, and no variables but these, HOME and PATH."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    return subprocess.run(
        command, env=variables, cwd=home, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


class Exchange(NamedTuple):
    """One request and its reply."""

    path: str
    body: dict[str, Any]
    status: int
    reply: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The data of a streamed reply."""
        lines = [line.removeprefix("data: ") for line in self.reply.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


class Recorder:
    """Passes requests on to the server at `url`. A context manager; `exchanges` grows while it is open.

    `options` are added to each generating request, such as greedy sampling, for which a program may have no option of
    its own, and `first` to the first one that is `wanted`, such as a tool to call, because the small model calls none.
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any],
        first: dict[str, Any] | None = None,
        wanted: Callable[[dict[str, Any]], bool] = bool,
    ) -> None:
        self.exchanges: list[Exchange] = []
        self._options, self._first, self._wanted = options, first or {}, wanted
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
                body = recorder.changed(json.loads(data)) if data else {}
                data = json.dumps(body).encode() if data else b""
                request = urllib.request.Request(url + self.path, data or None, headers, method=self.command)
                try:
                    answered = urllib.request.urlopen(request, timeout=300)
                except urllib.error.HTTPError as error:
                    answered = error
                with answered:
                    reply = answered.read()
                recorder.exchanges.append(Exchange(self.path, body, answered.status, reply.decode()))
                self.send_response(answered.status)
                self.send_header("content-type", answered.headers["content-type"])
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_HEAD = do_POST = _pass_on  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def changed(self, body: dict[str, Any]) -> dict[str, Any]:
        first: dict[str, Any] = {}
        if self._wanted(body):
            first, self._first = self._first, {}
        return body | self._options | first

    def __enter__(self) -> "Recorder":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
