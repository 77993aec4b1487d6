"""`specray serve` from a user's side, also in a notebook: it answers, exposes only its API, and stops."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx
import openai
import psutil
import pytest

from cluster.cli.supervise import FOLDER
from specray.cli.local_server import free_port
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.utils import launch_server_cmd, print_highlight, terminate_process, wait_for_server
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-P", "-m", "specray.cli.main", "serve"]
START_TIMEOUT_S = 240.0  # for a busy machine
STOP_TIMEOUT_S = 90.0
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

pytestmark = pytest.mark.slow  # so it comes before the files that share a cluster, which would run beside this one


class Served:
    """A running `specray serve` and its log."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.port = free_port()
        self._log = log
        command = [
            *SERVE,
            f"--model={model}",
            f"--port={self.port}",
            "--device=cpu",
            "--num-threads=1",
            "--max-total-tokens=4096",
            "--served-model-name=tiny",
            *flags,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def announcement(self) -> str:
        """The line printed when it is ready."""
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
        """The folder of its Ray session."""
        return self.environment()["RAY_TMPDIR"]

    def environment(self) -> dict[str, str]:
        return environment_of(self.process)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(
        tiny_model, tmp_path_factory.mktemp("launcher") / "log", "--tp-size=2", "--speculative-algorithm=NGRAM"
    )
    try:
        server.announcement()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait()


def test_flags_configure_the_server(served: Served, tiny_model: Path) -> None:
    """Two ranks give the text of one."""
    url = f"http://127.0.0.1:{served.port}"
    assert re.search("(float32|bfloat16), NGRAM", served.announcement()), "the type that `auto` has become"
    assert f"NGRAM, tensor parallel 2 at {url}; try: curl {url}/v1/chat/completions " in served.announcement()
    params = [SamplingParams(max_tokens=48, temperature=temperature, seed=4) for temperature in (0.0, 0.8)]
    with LLM(model=str(tiny_model), device="cpu", max_total_tokens=4096) as llm:
        expected = [generation.choices[0].text for generation in llm.generate(["a b a b"] * 2, params)]
    for param, text in zip(params, expected, strict=True):
        body = {"prompt": "a b a b", "max_tokens": 48, "temperature": param.temperature, "seed": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body | {"model": "tiny"}, timeout=60.0)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == text


def test_a_reply_beyond_grpcs_default_limit_arrives(served: Served) -> None:
    """It crosses Serve by gRPC, whose messages have at most 4 MiB by default."""
    body = {"model": "tiny", "prompt": [[1] * 2000] * 5, "max_tokens": 1, "echo": True, "logprobs": 20}
    reply = httpx.post(f"http://127.0.0.1:{served.port}/v1/completions", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    assert len(reply.content) > 4 << 20, len(reply.content)
    assert len(reply.json()["choices"][-1]["logprobs"]["tokens"]) == 2001


def test_only_ports_of_serve_listen_beyond_loopback(served: Served) -> None:
    """The API listens on loopback without --host. Each Serve replica has one open port, which requires the token."""
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


def test_no_other_port_answers_at_the_machines_own_address(served: Served) -> None:
    """Asked as another machine would ask."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the address of the way out
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    sockets = [(process, *where) for process in family(served.folder) for where in listening(process)]
    answering = sorted({process for process, _, port in sockets if connects(own, port)})
    assert [line for line in command_lines(answering).splitlines() if not line.startswith("ray::ServeReplica:")] == []
    assert not connects(own, served.port)


def connects(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(5.0)
        return client.connect_ex((address, port)) == 0


def test_ray_requires_the_token(served: Served) -> None:
    found = re.search(r"--gcs-address=(\d\S+)", command_lines(family(served.folder)))
    assert found is not None
    ray = [str(Path(sys.executable).parent / "ray"), "status", "--address", found.group(1)]
    environment = served.environment()
    without_token = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
    refused = subprocess.run(ray, env=without_token, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "InvalidAuthToken" in refused.stdout + refused.stderr
    assert subprocess.run(ray, env=environment, capture_output=True, check=False).returncode == 0
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).parent.stat().st_mode & 0o077 == 0


def test_sigterm_lets_a_stream_finish_and_leaves_no_process(served: Served) -> None:
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
    assert_no_failure_is_logged(served.log.partition("stopping after running requests finish")[2])
    give_up = time.monotonic() + 5.0
    while (left := family(folder)) and time.monotonic() < give_up:  # Ray's monitors end last
        time.sleep(0.1)
    assert not left, command_lines(left)
    assert not Path(folder).exists()


def assert_no_failure_is_logged(log: str) -> None:
    """No line of the log reports a failure, neither ours nor Ray's."""
    words = ("bug", "error", "fail", "traceback", "unexpected", "died", "killed", "lost", "StackTrace", "infinite")
    found = [line for line in log.splitlines() if any(word.lower() in line.lower() for word in words)]
    assert found == [], "\n".join(found)


def until_refused(url: str, body: dict[str, Any]) -> Any:
    """The error of new requests after the signal."""
    give_up = time.monotonic() + 10.0
    while (reply := httpx.post(url, json=body | {"stream": False, "max_tokens": 1}, timeout=60.0)).status_code == 200:
        assert time.monotonic() < give_up
    assert (reply.status_code, reply.headers.get("retry-after")) == (503, "2"), reply.text
    return reply.json()


def environment_of(server: subprocess.Popen[bytes]) -> dict[str, str]:
    (launcher,) = psutil.Process(server.pid).children()
    return launcher.environ()


def family(folder: str) -> list[int]:
    """The server and all processes that it started: those with the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == folder:
                found.append(process.pid)
    return found


def listening(process: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens."""
    with suppress(psutil.Error):
        sockets = psutil.Process(process).net_connections("tcp")
        return {(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return set()


def command_lines(processes: list[int]) -> str:
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(psutil.Process(process).cmdline()))
    return "\n".join(lines)


class Starting:
    """A server that starts. Its standard output is a pipe that nobody reads, as of a `tee` that Ctrl-C has ended."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._marker = f"SPECRAY_TEST_{uuid4().hex}"
        self.log = folder / "log"
        self.port = free_port()
        reader, writer = os.pipe()
        os.close(reader)
        self.process = subprocess.Popen(
            [*SERVE, f"--model={model}", f"--port={self.port}", "--device=cpu", "--max-total-tokens=4096"],
            cwd=folder,
            env=os.environ | {self._marker: "1"},
            stdout=writer,
            stderr=self.log.open("wb"),
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a script
        )
        os.close(writer)

    def environments(self) -> list[dict[str, str]]:
        """Of all processes that it has started, and its own."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._marker in (environment := process.environ()):
                    found.append(environment)
        return found


# Every pair of a signal and a moment, of a signal and a receiver, and of a receiver and a moment.
@pytest.mark.parametrize(
    ("number", "is_group", "moment_s"),
    [
        (number, (number is signal.SIGINT) == (moment_s == 2.5), moment_s)
        for number in (signal.SIGINT, signal.SIGTERM)
        for moment_s in (0.5, 2.5, 8.0)
    ],
)
def test_a_signal_while_starting_ends_everything(
    number: signal.Signals, is_group: bool, moment_s: float, tiny_model: Path, tmp_path: Path
) -> None:
    server = Starting(tiny_model, tmp_path)
    time.sleep(moment_s)
    folders = {environment[FOLDER] for environment in server.environments() if FOLDER in environment}
    (os.killpg if is_group else os.kill)(server.process.pid, number)
    assert server.process.wait(15.0) == 128 + number
    assert server.environments() == []
    assert [folder for folder in folders if Path(folder).exists()] == []
    assert server.log.read_text() == "interrupted\n"


def test_a_killed_server_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    """A launcher whose supervisor is killed stops as by a signal."""
    server = Starting(tiny_model, tmp_path)
    wait_until(lambda: any("RAY_TMPDIR" in environment for environment in server.environments()), START_TIMEOUT_S)
    time.sleep(8.0)  # Ray starts
    server.process.kill()
    wait_until(lambda: server.environments() == [], seconds=30)


def test_a_port_that_another_server_takes_meanwhile_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Serve's proxy would share it, and each server would get some of the requests."""
    server = Starting(tiny_model, tmp_path)
    wait_until(lambda: any("RAY_TMPDIR" in environment for environment in server.environments()), START_TIMEOUT_S)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", server.port))
        other.listen()
        assert server.process.wait(START_TIMEOUT_S) == 2
    assert f"http_options.port={server.port} is already used by process {os.getpid()}" in server.log.read_text()


def test_a_notebooks_documented_cell_runs_and_a_second_signal_stops_its_server_at_once(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where a stream is unfinished."""
    server_process, port = launch_server_cmd(
        f"""
python3 -m sglang.launch_server --model {tiny_model} --speculative-algorithm NGRAM \\
    --speculative-num-draft-tokens 8 --max-total-tokens 4096 --log-level warning --served-model-name tiny
"""
    )
    try:
        wait_for_server(f"http://localhost:{port}", timeout=START_TIMEOUT_S)
        client = openai.Client(base_url=f"http://127.0.0.1:{port}/v1", api_key="None")
        response = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=8)
        print_highlight(f"Response: {response.choices[0].text!r}")
        assert response.usage is not None
        assert response.usage.completion_tokens == 8
        assert "\x1b[1mResponse: " in capsys.readouterr().out
        folder = environment_of(server_process)["RAY_TMPDIR"]
        assert family(folder)
        options: Any = {"max_tokens": 2000, "n": 16, "extra_body": {"ignore_eos": True}}  # two fit into the KV pool
        stream = client.completions.create(model="tiny", prompt="Once", stream=True, **options)
        assert next(stream).choices[0].finish_reason is None
        for _ in range(2):
            server_process.send_signal(signal.SIGINT)
            time.sleep(1.5)
        assert server_process.wait(5.0) == 130
        assert family(folder) == []
        assert not Path(folder).exists()
    finally:
        terminate_process(server_process)


def test_modules_in_the_users_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("code", "json", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file in the folder was imported')")
    script = Path(sys.executable).parent / "specray"
    asked = subprocess.run([script, "serve", "--print-config"], cwd=tmp_path, capture_output=True, text=True)
    assert (asked.returncode, asked.stderr) == (0, "")
