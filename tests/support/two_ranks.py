"""Tensor parallelism without Ray: a process for each rank, forked from one that has imported the worker once."""

import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
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
from specray.worker.startup import start_worker
from specray.worker.warm_up import warm_up
from specray.worker.worker import Worker
from tests.support.forked import IMPORTED
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs

TIMEOUT_S = 120.0
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, *IMPORTED])


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
    in_graphs: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Choices of `prompts` from `size` processes; `in_graphs`: on the stand-in for CUDA graphs."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 4096} | options
    config = EngineConfig(model=str(folder), tp_size=size, speculative=speculative, **options)
    with tempfile.TemporaryDirectory() as meeting:
        address = f"file://{meeting}/ranks"
        arguments = [(config, rank, address, in_graphs) for rank in range(1, size)]
        others = [PROCESSES.Process(target=run_follower, args=each) for each in arguments]
        for process in others:
            process.start()
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as first:
            try:
                return first.submit(lead, config, address, prompts, params, in_graphs).result(TIMEOUT_S)
            finally:
                for process in others:  # without them rank 0 ends too
                    process.kill()
                    process.join()


def lead(
    config: EngineConfig, address: str, prompts: list[list[int]], params: list[dict[str, Any]], in_graphs: bool
) -> list[dict[str, Any]]:
    """Run rank 0, which drives the others."""
    torch.set_num_threads(1)
    if not in_graphs:
        return _lead(config, address, prompts, params)
    with recorded_graphs() as graphs:
        choices = _lead(config, address, prompts, params, graphs)
        verified = {key[2:] for key in graphs[0].replayed if key[0] == "verify"}  # type: ignore[index]
        assert verified >= {(True, False), (True, True)}  # sampled, and without or with filters
    return choices


def _lead(
    config: EngineConfig,
    address: str,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    graphs: Sequence[RecordedGraphs] = (),
) -> list[dict[str, Any]]:
    worker = start_worker(config, 0, config.tp_size, address)
    warm_up(worker, config)
    num_captures = [each.num_captures for each in graphs]
    engine = Engine(config, RankZero(worker), load_tokenizer(Path(config.model)).backend_tokenizer)
    for index, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(EngineRequest(str(index), prompt, make_sampling_params(**options)))
    choices: list[dict[str, Any]] = [{"token_ids": [], "text": ""} for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            choice = choices[int(output.request_id)]
            choice["token_ids"] += output.token_ids
            choice["text"] += output.text
            choice["finish_reason"] = output.finish_reason
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = output.prompt_logprobs
            assert output.finish_reason is not FinishReason.ERROR, output.error
    assert num_captures == [each.num_captures for each in graphs], "a request waited for a capture"
    return choices


def run_follower(config: EngineConfig, rank: int, address: str, in_graphs: bool) -> None:
    """Run another rank until it is killed."""
    torch.set_num_threads(1)
    with recorded_graphs() if in_graphs else nullcontext():
        worker = start_worker(config, rank, config.tp_size, address)
        warm_up(worker, config)
        worker.run_loop()
