"""`specray serve` before it starts Ray: configuration from a file and flags, errors, and the environment."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import serve
from cluster.cli.check import check_file
from cluster.cli.launcher import error_line
from cluster.cli.serve import RAY_OPTIONS, check, exposure, main, ray_environment
from cluster.config import AppConfig
from cluster.process_settings import ONE_LOOP
from specray.cli.local_server import free_port
from tests.support.front_proxy import write_certificate

ROOT = Path(__file__).parents[4]
EAGLE3 = ROOT / "configs/eagle3.yaml"


def printed(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[Path, AppConfig]:
    """The output of --print-config as a file, and its application."""
    assert main([*arguments, "--print-config"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    (app,) = check_file(path).values()
    return path, app


def test_defaults_apply_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, app = printed(capsys, tmp_path)
    assert app == AppConfig()
    assert yaml.safe_load(path.read_text())["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_flags_and_a_file_give_the_same_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, from_file = printed(capsys, tmp_path, str(EAGLE3))
    _, from_flags = printed(
        capsys,
        tmp_path,
        "--model-path",
        "smollm2-135m-instruct",
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        "smollm2-135m-instruct-eagle3",
        "--speculative-num-steps",
        "6",
        "--speculative-eagle-topk",
        "3",
        "--speculative-num-draft-tokens",
        "8",
        "--speculative-draft-model-quantization",
        "auto",
        "--speculative-max-step-draft-tokens",
        "8",
        "--server-default-max-tokens",
        "1024",
    )
    assert from_file == from_flags == check_file(EAGLE3)["specray"]


def test_flags_override_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--tp-size", "2", "--port", "9", "--no-disable-radix-cache", "--server-drain-s", "5", "--host", "::1"]
    path, app = printed(capsys, tmp_path, str(EAGLE3), *flags)
    assert (app.tp_size, app.server.drain_s, app.speculative.num_steps) == (2, 5.0, 6)
    assert yaml.safe_load(path.read_text())["http_options"] == {"host": "::1", "port": 9}


def test_a_printed_configuration_can_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, app = printed(capsys, tmp_path, str(EAGLE3), "--dtype", "float32", "--placement-rank-resources", "{rack: 1}")
    text = path.read_text()
    assert printed(capsys, tmp_path, str(path)) == (path, app)
    assert path.read_text() == text


def test_a_file_without_a_host_is_served_on_loopback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Serve's default is all interfaces."""
    document = yaml.safe_load(EAGLE3.read_text())
    del document["http_options"]
    file = tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump(document))
    path, _ = printed(capsys, tmp_path, str(file))
    assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp-size", "0"], "command line: specray.args.tp_size=0: Input should be greater than or equal to 1"),
        (["--tp-size", "two"], "specray.args.tp_size='two'"),
        (["--speculative-algorithm", "NGRM"], "speculative.algorithm='NGRM' is not known; choose one of"),
        (["--speculative-num-step", "3"], "--speculative-num-step: unknown flag; did you mean --speculative-"),
        (["--speculative-num-steps=3"], "has no effect while speculative.algorithm is null"),
        (["--prot", "9000"], "--prot: unknown flag; did you mean --port?"),
        (["missing.yaml"], "missing.yaml"),
        (["--model", "./missing", "--port", "0"], "model='./missing' looks like a local path, but nothing is there"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_become_launcher", start_nothing)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "\tx: 1",
        "[" * 5000,
        "x: 2020-99-99",
        "just words",
        "http_options: 5\napplications: []",
        "applications: 7",
        "applications: [7]",
        "applications: [{import_path: 'cluster.app:build', args: 5}]",
        "applications: [{import_path: 'a:b', name: x, route_prefix: /x}, {import_path: 'a:b', name: y}]",
        "\x01",
    ],
)
def test_errors_about_a_file_name_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_become_launcher", start_nothing)
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    assert main([str(file), "--tp-size", "1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {file}")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("alice " + "k" * 16, 0o644, "accessible to other users"),
        ("alice short", 0o600, "the key of alice has 5 characters"),
        ("alice " + "k" * 16 + "\nbob " + "k" * 16, 0o600, "has a key twice"),
        ("", 0o600, "has no keys"),
        (None, 0o600, "cannot be read"),
    ],
)
@pytest.mark.parametrize("option", ["api-key-file", "admin-key-file"])
def test_key_files_are_checked_before_ray_starts(
    option: str,
    content: str | None,
    mode: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_become_launcher", start_nothing)
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    assert main([f"--server-{option}={file}", "--port", str(free_port())]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"server.{option.replace('-', '_')}={file}" in error


@pytest.mark.parametrize("path", ["file", "file/new"])
def test_a_request_log_that_cannot_be_a_folder_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = ["--model", "smollm2-135m-instruct", "--server-request-log-tenants=['*']"]
    assert check([*arguments, f"--server-request-log={tmp_path / path}"]) == 2
    error = f"server.request_log={tmp_path / path}: {tmp_path / 'file'} is not a folder; name another folder"
    assert error in capsys.readouterr().err
    assert check([*arguments, f"--server-request-log={tmp_path / 'not' / 'yet'}"]) == 0
    assert not (tmp_path / "not").exists()


def test_tenants_of_the_request_log_and_of_corpora_must_have_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice " + "k" * 16)
    file.chmod(0o600)
    arguments = [
        "--model",
        "smollm2-135m-instruct",
        f"--server-api-key-file={file}",
        f"--server-request-log={tmp_path}",
    ]
    assert check([*arguments, "--server-request-log-tenants=[alice, eve]"]) == 2
    assert "server.request_log_tenants has eve, which is not a name in server.api_key_file" in capsys.readouterr().err
    ngrams = [*arguments, "--server-request-log-tenants=[alice]", "--speculative-algorithm=NGRAM"]
    assert check([*ngrams, "--speculative-corpora=[{name: docs, path: x, tenants: [eve]}]"]) == 2
    assert "speculative.corpora, docs: tenants has eve, which is not a name in" in capsys.readouterr().err


def test_a_port_in_use_is_an_error_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_become_launcher", start_nothing)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grpc_options": {"port": 9000}}, "grpc_options: not supported by `specray serve`"),
        ({"applications": [{"deployments": []}]}, "applications.0.deployments: not supported by `specray serve`"),
        ({"applications": [{}, {"name": "x", "import_path": "a:b", "route_prefix": "/x"}]}, "a:b: not supported"),
    ],
)
def test_keys_that_only_serve_run_supports_are_refused(
    change: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_become_launcher", start_nothing)
    document = yaml.safe_load(EAGLE3.read_text())
    first, *others = change.pop("applications", [{}])  # type: ignore[misc]
    document |= change
    document["applications"] = [document["applications"][0] | first, *others]
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump(document))
    assert main([str(file), "--port", str(free_port())]) == 2
    assert message in capsys.readouterr().err


def test_a_server_without_keys_on_other_interfaces_is_warned_about() -> None:
    closed = AppConfig.model_validate({"server": {"api_key_file": "keys"}})
    assert exposure("127.0.0.1", {"a": AppConfig()}) is None
    assert exposure("0.0.0.0", {"a": closed}) is None
    assert "--server-api-key-file" in str(exposure("0.0.0.0", {"a": closed, "b": AppConfig()}))


def test_a_local_cluster_has_its_own_token_and_listens_on_loopback(tmp_path: Path) -> None:
    outer = {"PATH": "/bin", "RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "old", "RAY_AUTH_MODE": "disabled"}
    environment = ray_environment(tmp_path, is_local=True, insecure=False, environment=outer)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["PATH"] == "/bin"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & environment.keys()


def test_a_joined_cluster_keeps_its_token(tmp_path: Path) -> None:
    outer = {"RAY_AUTH_TOKEN": "theirs"}
    environment = ray_environment(tmp_path, is_local=False, insecure=False, environment=outer)
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", "theirs")
    assert "RAY_TMPDIR" not in environment


@pytest.mark.parametrize(("name", "ours"), RAY_OPTIONS.items())
def test_ray_options_do_not_override_the_environment(name: str, ours: str, tmp_path: Path) -> None:
    for outer, value in (({}, ours), ({name: "7"}, "7")):
        assert ray_environment(tmp_path, is_local=True, insecure=False, environment=outer)[name] == value


@pytest.mark.parametrize("is_local", [True, False])
def test_the_launcher_does_not_take_one_loop(is_local: bool, tmp_path: Path) -> None:
    """It calls the ingress without an event loop, which Serve refuses with these variables."""
    outer = dict(ONE_LOOP)
    assert not ONE_LOOP.keys() & ray_environment(tmp_path, is_local, insecure=False, environment=outer).keys()
    threads = dict.fromkeys(ONE_LOOP, "1")
    assert threads.items() <= ray_environment(tmp_path, is_local, insecure=False, environment=threads).items()


def test_insecure_disables_the_token_explicitly(tmp_path: Path) -> None:
    """Ray enables the token by default."""
    assert ray_environment(tmp_path, is_local=True, insecure=True, environment={})["RAY_AUTH_MODE"] == "disabled"


def test_the_reason_of_a_failed_start_is_the_last_line_of_the_traceback() -> None:
    message = "The deployment failed to start 3 times.\n  File x, line 3\nspecray.errors.ConfigError: no room; do y\n"
    assert error_line(message) == "specray.errors.ConfigError: no room; do y"
    assert error_line("no node has 4 CPUs") == "no node has 4 CPUs"


def start_nothing(*_: object) -> None:
    raise AssertionError("this would have started a server")


def test_a_certificate_is_checked_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "_become_launcher", lambda document, _: started.append(document["http_options"]) or 0)
    monkeypatch.setattr(serve, "find_files", lambda _: None)
    good, broken = tmp_path / "good.pem", tmp_path / "broken.pem"
    write_certificate(good)
    broken.write_text("no certificate")
    port = f"--port={free_port()}"
    for key, certificate, message in (
        (good, None, "need each other"),
        (good, broken, "name a PEM file of each"),
        (tmp_path / "missing", good, "No such file"),
    ):
        flags = [f"--ssl-keyfile={key}", *([f"--ssl-certfile={certificate}"] if certificate else [])]
        assert main([port, *flags]) == 2
        assert message in capsys.readouterr().err
    assert main([port, f"--ssl-keyfile={good}", f"--ssl-certfile={good}"]) == 0
    assert [options["ssl_certfile"] for options in started] == [str(good)]


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "owner/name", "./folder", "models/x.gguf"])
def test_the_first_argument_may_be_a_model(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, app = printed(capsys, tmp_path, name, "--tp-size", "2")
    assert (app.model, app.tp_size) == (name, 2)


def test_a_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a/b", "--model", "c/d"]) == 2
    assert capsys.readouterr().err == "error: a/b and --model c/d both name a model; give one of them\n"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--served-model-name", "a"], ["a"]),
        (["--served-model-name", "a", "b"], ["a", "b"]),
        (["--served-model-name", "a,b"], ["a", "b"]),
        (["--served-model-name", "a", "b", str(EAGLE3)], ["a", "b"]),
        ([str(EAGLE3), "--served-model-name", "a", "b", "--tp-size", "1"], ["a", "b"]),
    ],
)
def test_a_model_may_have_several_names(
    arguments: list[str], names: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, app = printed(capsys, tmp_path, *arguments)
    assert app.server.served_model_name == names
    assert app.model == "smollm2-135m-instruct"
