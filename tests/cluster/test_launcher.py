"""`specray serve` as its user sees it: it answers, nothing but its API could be reached from outside, and it goes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from specray.cli.local_server import free_port
from specray.llm import LLM
from specray.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0  # of a machine with much else to do
STOP_TIMEOUT_S = 90.0
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}  # as /proc/net has them
LISTENING = "0A"


class Served:
    """A `specray serve` of our own, with its log."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self._log = log
        command = [
            sys.executable,
            "-m",
            "specray.cli.main",
            "serve",
            f"--model={model}",
            f"--port={self.port}",
            "--dtype=float32",
            "--device=cpu",
            "--num-threads=1",
            "--max-total-tokens=4096",
            "--speculative-algorithm=NGRAM",
            "--tp-size=2",
            "--served-model-name=tiny",
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def announcement(self) -> str:
        """The line that says it is ready."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(r"^ready: .*$", self.log, re.MULTILINE)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < give_up, self.log
            time.sleep(0.2)
        return found.group()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def folder(self) -> str:
        """Where its Ray keeps everything."""
        return self.environment()["RAY_TMPDIR"]

    def environment(self) -> dict[str, str]:
        entries = Path(f"/proc/{self.process.pid}/environ").read_bytes().decode().split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tiny_model, tmp_path_factory.mktemp("launcher") / "log")
    try:
        server.announcement()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait()


def test_it_serves_what_the_flags_said(served: Served, tiny_model: Path) -> None:
    """Two ranks, and they write what one writes."""
    url = f"http://127.0.0.1:{served.port}"
    assert f"NGRAM, tensor parallel 2 at {url}; try: curl {url}/v1/chat/completions " in served.announcement()
    params = [SamplingParams(max_tokens=48, temperature=temperature, seed=4) for temperature in (0.0, 0.8)]
    with LLM(model=str(tiny_model), dtype="float32", device="cpu", max_total_tokens=4096) as llm:
        expected = [generation.choices[0].text for generation in llm.generate(["a b a b"] * 2, params)]
    for param, text in zip(params, expected, strict=True):
        body = {"prompt": "a b a b", "max_tokens": 48, "temperature": param.temperature, "seed": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body | {"model": "tiny"}, timeout=60.0)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == text


def test_all_but_serves_own_ports_listen_on_loopback(served: Served) -> None:
    """The API too, as --host is not given. One port of each Serve replica is open to all, and asks for the token."""
    sockets = [(process, *where) for process in family(served.folder) for where in listening(process)]
    assert served.port in {port for _, _, port in sockets}
    outside = [(command_lines([process]), port) for process, address, port in sockets if address not in LOOPBACK]
    assert [line for line, _ in outside if not line.startswith("ray::ServeReplica:")] == []
    for _, port in outside:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10.0)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_gets_into_ray_without_the_token(served: Served) -> None:
    found = re.search(r"--gcs-address=(\d\S+)", command_lines(family(served.folder)))
    assert found is not None
    ray = [str(Path(sys.executable).parent / "ray"), "status", "--address", found.group(1)]
    ours = served.environment()
    stranger = {name: value for name, value in ours.items() if not name.startswith("RAY_AUTH_")}
    refused = subprocess.run(ray, env=stranger, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "InvalidAuthToken" in refused.stdout + refused.stderr
    assert subprocess.run(ray, env=ours, capture_output=True, check=False).returncode == 0
    assert Path(ours["RAY_AUTH_TOKEN_PATH"]).parent.stat().st_mode & 0o077 == 0


def test_sigterm_lets_a_stream_finish_and_leaves_nothing(served: Served) -> None:
    folder = served.folder
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 250, "stream": True, "ignore_eos": True}
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60.0) as reply:
        lines = reply.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        assert until_refused(url, body)["error"]["code"] == "service_unavailable"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert served.process.wait(STOP_TIMEOUT_S) == 0, served.log
    give_up = time.monotonic() + 5.0
    while (left := family(folder)) and time.monotonic() < give_up:  # Ray's own watchers end after those they watch
        time.sleep(0.1)
    assert not left, command_lines(left)
    assert not Path(folder).exists()


def until_refused(url: str, body: dict[str, Any]) -> Any:
    """What new requests are told once the signal has come through."""
    give_up = time.monotonic() + 10.0
    while (reply := httpx.post(url, json=body | {"stream": False, "max_tokens": 1}, timeout=60.0)).status_code == 200:
        assert time.monotonic() < give_up
    assert (reply.status_code, reply.headers.get("retry-after")) == (503, "2"), reply.text
    return reply.json()


def family(folder: str) -> list[int]:
    """Processes that have the folder's name in their environment: the server and all it started."""
    marker, found = f"RAY_TMPDIR={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def listening(process: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens."""
    held = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            held.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == LISTENING and f"socket:[{others[5]}]" in held:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


def command_lines(processes: list[int]) -> str:
    lines = []
    for process in processes:
        with suppress(OSError):
            lines.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "))
    return "\n".join(lines)
