"""A documented notebook cell: start a server, wait, ask, end it."""

from pathlib import Path

import openai
import psutil
import pytest

from specray.utils import launch_server_cmd, print_highlight, terminate_process, wait_for_server

pytestmark = pytest.mark.slow  # so it comes before the files that share a cluster, which would run beside this one


def test_the_documented_cell_runs(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server_process, port = launch_server_cmd(
        f"""
python3 -m sglang.launch_server --model {tiny_model} --speculative-algorithm NGRAM \\
    --speculative-num-draft-tokens 8 --max-total-tokens 4096 --log-level warning --served-model-name tiny
"""
    )
    try:
        wait_for_server(f"http://localhost:{port}", timeout=240)
        family = psutil.Process(server_process.pid).children(recursive=True)
        assert family
        client = openai.Client(base_url=f"http://127.0.0.1:{port}/v1", api_key="None")
        response = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=8)
        print_highlight(f"Response: {response.choices[0].text!r}")
        assert response.usage is not None
        assert response.usage.completion_tokens == 8
        assert "\x1b[1mResponse: " in capsys.readouterr().out
    finally:
        terminate_process(server_process)
    assert server_process.returncode is not None
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
