"""The examples that need a server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONG = {"prompt": "One two one two one two", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_the_openai_client_prints_an_answer_and_its_accept_length(app: Any) -> None:
    command = [sys.executable, "examples/openai_client.py", "--url", f"{app.url}/v1", "--max-tokens", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens, accept length " in done.stdout


def test_a_custom_drafter_is_served_by_its_import_path(app: Any, large_app: Any) -> None:
    served, expected = large_app.complete(**LONG), app.complete(**LONG)
    assert served["choices"][0]["text"] == expected["choices"][0]["text"]
    assert served["usage"]["speculative"]["draft_tokens"] > 0
