"""A pass that was started runs while its caller does something else, until it is joined."""

import gc
import os
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.ops.cpu import threads
from specray.ops.cpu.library import kernels
from specray.step import UNLIMITED, NewRequest, RequestResult, ScheduledRequest, StepPlan
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.distributions import OPTIONS
from tests.support.forked import call
from tests.support.toy import write_toy

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")

KEPT: list[Worker] = []  # until the interpreter ends
PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5, 6, 7]]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threads, "_SMALL", 0)  # the toy model's weights are small enough for one thread
    count: int = request.param
    return count


def make_worker(folder: Path, num_threads: int) -> Worker:
    options = {"dtype": "float32", "device": "cpu", "page_size": 16, "max_total_tokens": 256}
    return start_worker(EngineConfig(model=str(folder), num_threads=num_threads, **options))


def first_step(prompt: list[int]) -> StepPlan:
    new = NewRequest(0, prompt, len(prompt), 0, [1, 2], OPTIONS._replace(temperature=0.0), "")
    return StepPlan(1, [], [new], [ScheduledRequest(0, 100, UNLIMITED, [])])


def steps(worker: Worker, prompt: list[int], count: int) -> list[RequestResult]:
    """A prompt and the steps after it, each started before the caller handles the result before it."""
    results = []
    worker.begin(first_step(prompt))
    for step in range(count):
        [result] = worker.finish().rows
        worker.begin(StepPlan(step + 2, [], [], [ScheduledRequest(0, 1, UNLIMITED, [])]))
        results.append(result)
    worker.finish()
    return results


def test_the_result_is_the_same_whoever_joins_it(toy: Path, num_threads: int) -> None:
    """Another worker's kernels join the pass. Both workers' passes are started in turns."""
    first, second = make_worker(toy, num_threads), make_worker(toy, num_threads)
    alone = [steps(worker, prompt, 6) for worker, prompt in zip((first, second), PROMPTS, strict=True)]
    workers = [make_worker(toy, num_threads) for _ in PROMPTS]
    found: list[list[RequestResult]] = [[], []]
    for worker, prompt in zip(workers, PROMPTS, strict=True):
        worker.begin(first_step(prompt))
    for step in range(6):
        for worker, results in zip(workers, found, strict=True):
            results += worker.finish().rows
            worker.begin(StepPlan(step + 2, [], [], [ScheduledRequest(0, 1, UNLIMITED, [])]))
    assert found == alone


def test_a_worker_may_be_dropped_while_its_pass_runs(toy: Path, num_threads: int) -> None:
    for _ in range(10):
        worker = make_worker(toy, num_threads)
        worker.begin(first_step(PROMPTS[0]))
        del worker
        gc.collect()
        torch.full((1 << 20,), float("nan"))  # takes the memory that was freed
    assert steps(make_worker(toy, num_threads), PROMPTS[0], 1)[0].error is None


@pytest.mark.parametrize("function", ["fork_while_a_pass_runs", "end_while_a_pass_runs"])
def test_a_process_does_not_wait_for_a_pass_that_nobody_joins(function: str, tmp_path: Path) -> None:
    """A child that was forked meanwhile, and an interpreter that ends."""
    write_toy(tmp_path)
    ended = call(f"{__name__}:{function}", TOY=str(tmp_path))
    assert ended.status == 0, ended.output


def fork_while_a_pass_runs() -> None:
    worker = start_pass_on_two_threads()
    child = os.fork()
    if not child:
        assert steps(make_worker(Path(os.environ["TOY"]), 2), PROMPTS[0], 1)[0].token_ids
        os._exit(0)
    [result] = worker.finish().rows
    assert result.token_ids
    assert os.waitpid(child, 0)[1] == 0


def end_while_a_pass_runs() -> None:
    KEPT.append(start_pass_on_two_threads())


def start_pass_on_two_threads() -> Worker:
    threads._SMALL = 0
    worker = make_worker(Path(os.environ["TOY"]), 2)
    worker.begin(first_step(PROMPTS[0]))
    return worker
