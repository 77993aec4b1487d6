"""The scripts in examples/ run, with small models instead of their defaults where these take long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specray.cli.local_server import free_port
from specray.config import EngineConfig, SpeculativeConfig
from specray.testing import DRAFTER_CHECKS
from specray.testing.conformance import Check
from specray.train.prompts import read_prompt_file
from tests.support.eagle_toy import toy_head
from tests.support.forked import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object, status: int = 0) -> str:
    """Output of a script that ends with `status`, run from the repository's root without internet access."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def run_locally(name: str, *arguments: object) -> str:
    """The same for a script whose models are here, without the seconds in which a new process imports torch."""
    status, output = run_script(EXAMPLES / name, *arguments)
    assert status == 0, output
    return output


def test_offline_inference() -> None:
    output = run_locally("offline_inference.py", "--max-tokens", 4)
    assert "plain decoding: " in output
    assert "EAGLE-3: " in output
    assert "'The capital of France is' -> ' Paris." in output


def test_a_custom_drafter(stories: Path) -> None:
    output = run_locally("custom_drafter.py", "--model", stories)
    assert "the text of plain decoding" in output
    assert "0 of 24 tokens" not in output


@pytest.mark.parametrize("check", DRAFTER_CHECKS)
def test_the_custom_drafter_passes_the_checks(check: Check, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    drafter = SpeculativeConfig(algorithm="custom_drafter:LastSeen")
    check(EngineConfig(model=str(toy), device="cpu", num_threads=1, max_total_tokens=4096, speculative=drafter))


@pytest.mark.parametrize("options", [(), ("--words-of", "smollm2-135m-instruct")], ids=["subjects", "words"])
def test_prompts_for_training(options: tuple[str, ...], tmp_path: Path) -> None:
    """Each of them once, the same ones every time, and readable by `specray train --prompts`."""
    output = run("training_prompts.py", 300, *options)
    assert run("training_prompts.py", 300, *options) == output
    path = tmp_path / "prompts.jsonl"
    path.write_text(output, encoding="utf-8")
    prompts = read_prompt_file(path, max_bad_rows=0)
    assert len(set(prompts.texts)) == 300
    assert prompts.describe()["licences"] == {"Apache-2.0": 300}


def test_training_a_head(stories: Path, tmp_path: Path) -> None:
    small = ["--tokens", 200, "--draft-vocab-size", 64]
    output = run_locally("train_head.py", "--model", stories, "--folder", tmp_path, *small)
    assert f"with the head in {tmp_path / 'run' / 'head'}" in output


def test_a_published_head(toy: Path, tmp_path: Path) -> None:
    head = toy_head("eagle3-safeailab").write(tmp_path / "head")
    assert "accept length" in run_locally("public_eagle3_head.py", "--model", toy, "--head", head)


def test_a_published_head_without_internet_access_names_what_it_needs() -> None:
    message = run("public_eagle3_head.py", status=1)
    assert "needs the target deepseek-ai/DeepSeek-R1-Distill-Llama-8B" in message
    assert "--model FOLDER --head FOLDER" in message


def test_the_client_without_a_server_says_how_to_start_one() -> None:
    message = run("openai_client.py", "--url", f"http://127.0.0.1:{free_port()}/v1", status=1)
    assert "specray serve configs/eagle3.yaml" in message
