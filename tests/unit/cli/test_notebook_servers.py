"""`specray.utils` without a server; `tests/cluster/test_launcher.py` runs a documented cell."""

import subprocess
import sys
import time
from typing import Any
from unittest import mock

import psutil
import pytest

from specray import utils
from specray.errors import ConfigError, SpecRayError


def started(command: str, **options: Any) -> tuple[list[str], int]:
    """The arguments of the server that a command starts, and its port."""
    with mock.patch.object(subprocess, "Popen") as popen:
        _, port = utils.launch_server_cmd(command, **options)
    command_line = popen.call_args.args[0]
    return command_line[command_line.index("serve") + 1 :], port


def test_a_cell_of_sglangs_documentation_starts_a_server() -> None:
    cell = """
python3 -m sglang.launch_server --model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE \\
    --speculative-num-steps 3 --log-level warning
"""
    arguments, port = started(cell)
    assert arguments[:6] == [
        *("--model", "meta-llama/Llama-2-7b-chat-hf", "--speculative-algorithm", "EAGLE"),
        *("--speculative-num-steps", "3"),
    ]
    assert arguments[-4:] == ["--port", str(port), "--host", "127.0.0.1"]


def test_a_named_host_and_port_are_kept() -> None:
    assert started("specray serve --port 8123 --host=::1") == (["--port", "8123", "--host=::1"], 8123)
    assert started("specray serve", port=8124) == (["--port", "8124", "--host", "127.0.0.1"], 8124)


def test_another_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins with 'rm -rf x'; begin it with `specray serve`"):
        utils.launch_server_cmd("rm -rf x")


def test_waiting_ends_with_the_process_or_the_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SpecRayError, match="ended with status 3"):
        utils.wait_for_server("http://127.0.0.1:9", process=process)
    with pytest.raises(SpecRayError, match=r"not ready within 0.1 s"):
        utils.wait_for_server("http://127.0.0.1:9", timeout=0.1)


def test_the_whole_family_of_a_process_ends() -> None:
    sleep = "subprocess.Popen(['sleep', '99'], start_new_session=True)"
    child = f"import subprocess, time; {sleep}; print(flush=True); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    [sleeping] = psutil.Process(process.pid).children(recursive=True)
    start = time.monotonic()
    utils.terminate_process(process)
    utils.terminate_process(process)  # harmless
    assert process.poll() is not None
    sleeping.wait(60)
    assert time.monotonic() - start < 60  # it would sleep for 99 s
