"""`make clients`: its table of clients, their pinned versions and their examples fit together, and failures are seen.

SPECRAY_CLIENTS=1 installs the clients and runs them, which takes minutes.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.clients import __main__ as command
from tests.clients.environments import CLIENTS, INSTALLED, Client, Environment, environment_of
from tests.clients.run import PAGE, PROBE, Outcome, Report, examples, parsed, slowness, use

PACKAGES = {
    "openai-python": "openai",
    "openai-node": "openai",
    "llama-index": "llama-index-llms-openai-like",
    "pydantic-ai": "pydantic-ai-slim",
    "claude-code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
    "open-webui": "aiohttp",
}
SCRIPT = """
from report import equal, run, scenario

@scenario
def passes():
    print("a client's own output")

@scenario
def fails():
    equal(1, 2)

@scenario
async def passes_too():
    pass

run("pip")
"""


def pins(client: Client) -> dict[str, str]:
    text = client.requirements.read_text(encoding="utf-8")
    if client.is_node:
        return dict(json.loads(text)["dependencies"])
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_exact_versions_a_script_and_an_example(name: str) -> None:
    client = CLIENTS[name]
    assert client.path.is_file()
    assert all(version[0].isdigit() for version in pins(client).values())
    assert [*examples(PAGE.read_text(encoding="utf-8"), name)], f"add a section {name} to {PAGE}"


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_names_the_version_that_was_run(name: str) -> None:
    package = PACKAGES.get(name, name)
    row = f"| [{name}](#{name}) | {package} {pins(CLIENTS[name])[package]} |"
    assert row in PAGE.read_text(encoding="utf-8")


def test_each_scenario_is_reported(tmp_path: Path) -> None:
    folder = command.BUILD.parents[1] / "tests" / "clients" / "scenarios"
    (tmp_path / "script.py").write_text(f"import sys\nsys.path.insert(0, {str(folder)!r})\n{SCRIPT}")
    client = Client("no-such-client", str(tmp_path / "script.py"))
    report = use(client, Environment(tmp_path, Path(sys.executable)), "http://127.0.0.1:9", "key")
    assert [outcome.name for outcome in report.outcomes] == ["passes", "fails", "passes_too"]
    [failed] = report.failures
    assert "found    1" in (failed.error or "")
    assert report.version[0].isdigit()


def test_a_script_that_breaks_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text('print(\'{"version": "1.0"}\')\nraise SystemExit("no such package")')
    client = Client("no-such-client", str(tmp_path / "script.py"))
    report = use(client, Environment(tmp_path, Path(sys.executable)), "http://127.0.0.1:9", "key")
    assert report == Report("1.0", [Outcome("the script itself", "no such package\n")])


def test_time_limits_follow_the_speed_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.clients.run.TIMEOUT_S", 0.01)
    (tmp_path / "script.py").write_text(
        'import os\nprint(\'{"version": "\' + os.environ["SPECRAY_TIMEOUT_S"] + \'"}\')'
    )
    client, environment = (
        Client("no-such-client", str(tmp_path / "script.py")),
        Environment(tmp_path, Path(sys.executable)),
    )
    [outcome] = use(client, environment, "http://127.0.0.1:9", "key").outcomes
    assert outcome == Outcome("the script itself", "not finished after 0.01 s")
    assert use(client, environment, "http://127.0.0.1:9", "key", slowness=1e5) == Report("1000", [])


def test_a_server_is_slow_if_it_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked == PROBE
            time.sleep(0.2)
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert slowness(url, "key") == 1.0
        monkeypatch.setattr("tests.clients.run.PROBE_S", 0.001)
        assert slowness(url, "key") >= 200
        server.shutdown()


def test_the_table_counts_whole_clients_only() -> None:
    _, outcomes = parsed('noise\n{"scenario": "a", "error": null}\n{"scenario": "b", "error": "x"}')
    reports = {"one": Report("1.0", outcomes), "two": Report("2.0", outcomes[:1]), "three": Report("?", [])}
    lines = command.table(reports, {"four": "no index"}).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:6]] == [
        "1 of 2",
        "1 of 1",
        "0 of 0",
        "not installed: no index",
    ]
    assert lines[-1] == "1 of 4 clients pass all of their scenarios"


def test_an_environment_is_kept_while_its_requirements_are_the_same(tmp_path: Path) -> None:
    client = CLIENTS["openai-python"]
    folder = tmp_path / client.name
    folder.mkdir()
    (folder / INSTALLED).write_text(client.requirements.read_text(encoding="utf-8"), encoding="utf-8")
    found = environment_of(client, tmp_path, lambda text: pytest.fail(text))
    assert found == Environment(folder, folder / "bin" / "python", folder / "bin")


def test_an_unknown_client_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["langchain"])
    assert "'langchain' is not one of openai-python, openai-node" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif("SPECRAY_CLIENTS" not in os.environ, reason="asks package indexes: SPECRAY_CLIENTS=1")
def test_every_client_passes() -> None:
    assert command.main([]) == 0
