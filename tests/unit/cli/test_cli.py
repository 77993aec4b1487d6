"""The command line: usage, errors, and `specray check`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specray import __version__
from specray.bench.command import default_variants, engine_config
from specray.cli import main as cli
from specray.config import EngineConfig
from specray.errors import ConfigError
from tests.support.serve_file import SERVE_CONFIG


@pytest.mark.parametrize(
    "arguments", [["--help"], *([command, "--help"] for command in ("chat", "bench", "tune", "train", "status"))]
)
def test_every_command_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "usage: specray" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"specray {__version__}\n"


@pytest.mark.parametrize("command", ["bench", "load", "tune", "chat"])
def test_an_unknown_flag_gets_the_usage_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "--no-such-flag", "3"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: specray {command} ")
    assert error.endswith(f"specray {command}: error: unrecognized arguments: --no-such-flag 3\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["chat", "--temperature", "warm"],
        ["bench", "--max-tokens", "0"],
        ["bench", "--arms", "plain,,ngram"],
        ["bench", "--arms", "plain,plain"],
        ["bench", "--dtype", "int4"],
        ["tune", "--batch-sizes", "1,1"],
        ["tune", "--batch-sizes", "0"],
        ["tune", "--candidates", "5-4"],
        ["tune", "--candidates", "5-4-16,5-4-16"],
        ["train"],
        ["status", "--interval", "soon"],
    ],
)
def test_wrong_usage_exits_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--arms", "magic"],
            "variant 'magic' is unknown; choose from plain, transformers, corpus:NAME, eagle3, ",
        ),
        (["bench", "--arms", "transformers", "--temperature", "0.5"], "temperature=0.5"),
        (["bench", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["bench", "--config", "missing.yaml"], "error: missing.yaml: No such file or directory"),
        (["bench", "--model", "./missing", "--limit", "1"], "missing"),
        (["bench", "--concurrency", "1000"], "max_running_requests=48"),
        (["tune", "--method", "plain"], "plain decoding has no draft tree"),
        (["tune", "--method", "magic"], "variant 'magic' is unknown"),
        (["tune", "--method", "ngram", "--candidates", "1"], "num_draft_tokens=1"),
        (["tune", "--method", "ngram", "--batch-sizes", "40"], "batch size 40 needs as many prompts"),
        (["tune", "--config", "missing.yaml"], "missing.yaml"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["status", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_ctrl_c_exits_with_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("specray.cli.chat.run", interrupt)
    assert cli.main(["chat"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_reader_that_ends_early_is_no_error(size: int) -> None:
    """As in `specray status --once | head -1`."""
    replaced = f"chat.run = lambda _: print('x' * {size}) or 0"
    program = f"from specray.cli import chat, main; {replaced}; exit(main.main(['chat']))"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(("command", "function"), [("serve", "supervise.main"), ("check", "serve.check")])
def test_commands_of_the_cluster_get_all_arguments(
    command: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged, including --help."""
    seen: list[list[str]] = []
    monkeypatch.setattr(f"cluster.cli.{function}", lambda arguments: seen.append(arguments) or 7)
    assert cli.main([command, "x.yaml", "--help"]) == 7
    assert seen == [["x.yaml", "--help"]]


def test_bench_reads_the_engine_options_of_a_serve_config(serve_config: Path) -> None:
    config = engine_config(serve_config, concurrency=2, dtype="float32", model=None)
    assert (config.max_running_requests, config.dtype) == (4, "float32")
    assert config.speculative.algorithm == "NGRAM"
    with pytest.raises(ConfigError, match="concurrency=5 is more than max_running_requests=4"):
        engine_config(serve_config, concurrency=5)


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ({}, ["plain", "ngram", "eagle3"]),
        ({"model": "other"}, ["plain", "ngram"]),
        ({"speculative": {"algorithm": "NGRAM"}}, ["plain", "ngram"]),
        ({"speculative": {"algorithm": "my.module:Drafter"}}, ["plain", "ngram", "eagle3"]),
    ],
)
def test_bench_compares_the_configured_method_by_default(options: dict[str, object], variants: list[str]) -> None:
    assert default_variants(EngineConfig.model_validate(options)) == variants


@pytest.mark.parametrize("text", ["[]", "a: [", "applications: []", "modle: x"])
def test_bench_refuses_other_configs(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        engine_config(path, concurrency=1)


def test_check_reports_a_valid_file(serve_config: Path) -> None:
    done = run_check(serve_config)
    assert (done.returncode, done.stderr) == (0, "")
    assert "application 'specray' is valid: smollm2-135m-instruct, auto, NGRAM" in done.stdout


def test_check_of_an_invalid_file_exits_with_status_2(serve_config: Path) -> None:
    serve_config.write_text(SERVE_CONFIG.replace("NGRAM", "NGRM"))
    done = run_check(serve_config)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def run_check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specray.cli.main", "check", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
