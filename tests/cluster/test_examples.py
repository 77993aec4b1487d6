"""The examples that need a server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.conftest import LONG, Redeployment

ROOT = Path(__file__).parents[2]


def test_the_openai_client_prints_an_answer_and_its_accept_length(app: Any) -> None:
    command = [sys.executable, "examples/openai_client.py", "--url", f"{app.url}/v1", "--max-tokens", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens, accept length " in done.stdout


def test_a_custom_drafter_is_served_by_its_import_path(redeployment: Redeployment) -> None:
    served = redeployment.app.complete(**LONG)
    assert served["choices"][0]["text"] == redeployment.expected
    assert served["usage"]["speculative"]["draft_tokens"] > 0
