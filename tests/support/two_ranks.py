"""Tensor parallelism without Ray: `python -m tests.support.two_ranks FOLDER` serves rank 0 and starts the others.

Reads {"options", "speculative", "prompts", "params"} as JSON from stdin, writes the choices as JSON to stdout.
"""

import json
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.executor import Capacity
from specray.engine.request import EngineRequest
from specray.models.tokenizer import load_tokenizer
from specray.outputs import FinishReason
from specray.sampling_params import make_sampling_params
from specray.step import StepPlan, StepResult
from specray.worker.worker import Worker

ROOT = Path(__file__).parents[2]


class RankZero:
    """Executor over this process's worker; plans are sent to the other ranks too."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._results: deque[StepResult] = deque()

    @property
    def capacity(self) -> Capacity:
        return self._worker.capacity

    def submit(self, plan: StepPlan) -> None:
        self._results.append(self._worker.execute(plan))
        self._worker.propose()

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._worker.close()


def run_ranks(
    folder: Path,
    size: int,
    speculative: SpeculativeConfig,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    **options: Any,
) -> list[dict[str, Any]]:
    """Choices of `prompts` from `size` processes."""
    job = {"options": options, "speculative": speculative.model_dump(), "prompts": prompts, "params": params}
    command = [sys.executable, "-m", "tests.support.two_ranks", str(folder), str(size)]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(job), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    choices: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return choices


def main(folder: str, size: int) -> None:
    torch.set_num_threads(1)
    job = json.load(sys.stdin)
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 4096} | job["options"]
    config = EngineConfig(model=folder, tp_size=size, speculative=SpeculativeConfig(**job["speculative"]), **options)
    with tempfile.TemporaryDirectory() as meeting:
        address = f"file://{meeting}/ranks"
        command = [sys.executable, "-m", "tests.support.two_ranks", folder, str(size)]
        followers = [
            subprocess.Popen([*command, str(rank), address, config.model_dump_json()], cwd=ROOT)
            for rank in range(1, size)
        ]
        try:
            choices = serve(config, Worker(config, 0, size, address), job)
        finally:
            for follower in followers:
                follower.kill()
                follower.wait()
    print(json.dumps(choices))


def serve(config: EngineConfig, worker: Worker, job: dict[str, Any]) -> list[dict[str, Any]]:
    engine = Engine(config, RankZero(worker), load_tokenizer(Path(config.model)).backend_tokenizer)
    for index, (prompt, params) in enumerate(zip(job["prompts"], job["params"], strict=True)):
        engine.add_request(EngineRequest(str(index), prompt, make_sampling_params(**params)))
    choices: list[dict[str, Any]] = [{"token_ids": [], "text": ""} for _ in job["prompts"]]
    while engine.has_work:
        for output in engine.step():
            choice = choices[int(output.request_id)]
            choice["token_ids"] += output.token_ids
            choice["text"] += output.text
            choice["finish_reason"] = output.finish_reason
            assert output.finish_reason is not FinishReason.ERROR, output.error
    return choices


def run_rank(rank: int, size: int, address: str, config: str) -> None:
    torch.set_num_threads(1)
    Worker(EngineConfig.model_validate_json(config), rank, size, address).run_loop()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        run_rank(int(sys.argv[3]), int(sys.argv[2]), sys.argv[4], sys.argv[5])
