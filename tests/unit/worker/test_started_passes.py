"""A pass that was started runs while its caller does something else, until it is joined."""

import gc
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.ops.cpu import processor
from specray.ops.cpu.library import kernels
from specray.step import UNLIMITED, NewRequest, RequestResult, ScheduledRequest, StepPlan
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.distributions import OPTIONS
from tests.support.forked import call
from tests.support.graph_stand_in import recorded_graphs
from tests.support.toy import write_toy

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")

KEPT: list[Worker] = []  # until the interpreter ends
PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5, 6, 7]]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(processor, "_SMALL", 0)  # the toy model's weights are small enough for one thread
    count: int = request.param
    return count


def make_worker(folder: Path, num_threads: int) -> Worker:
    options = {"dtype": "float32", "device": "cpu", "page_size": 16, "max_total_tokens": 256}
    return start_worker(EngineConfig(model=str(folder), num_threads=num_threads, **options))


def first_step(*prompts: list[int], ends_first: Sequence[int] = ()) -> StepPlan:
    """Requests in slots from 0 on, each with two blocks; `ends_first` are the tokens that end the first one."""
    new = []
    for slot, prompt in enumerate(prompts):
        options = OPTIONS._replace(temperature=0.0, eos_token_ids=[] if slot else list(ends_first))
        new.append(NewRequest(slot, prompt, len(prompt), 0, [1 + 2 * slot, 2 + 2 * slot], options, ""))
    return StepPlan(1, [], new, [ScheduledRequest(request.slot, 100, UNLIMITED, []) for request in new])


def next_step(number: int, *slots: int) -> StepPlan:
    return StepPlan(number, [], [], [ScheduledRequest(slot, 1, UNLIMITED, []) for slot in slots])


def steps(worker: Worker, prompt: list[int], count: int) -> list[RequestResult]:
    """A prompt and the steps after it, each started before the caller handles the result before it."""
    results = []
    worker.begin(first_step(prompt))
    for step in range(count):
        [result] = worker.finish().rows
        worker.begin(next_step(step + 2, 0))
        results.append(result)
    worker.finish()
    return results


def chained_steps(
    worker: Worker, first: StepPlan, count: int, num_started: list[int] | None = None
) -> list[list[RequestResult]]:
    """The results of a first step and of `count` more, each started before the one before is finished if it can be.

    `num_started` receives the number of steps that were started and not finished as each one began.
    """
    slots, results = [row.slot for row in first.rows], []
    worker.begin(first)
    for number in range(2, 2 + count):
        plan = next_step(number, *slots)
        if not worker.can_begin(plan):
            results.append(worker.finish().rows)
        worker.begin(plan)
        if num_started is not None:
            num_started.append(worker.num_started)
        if worker.num_started > 1:
            results.append(worker.finish().rows)
    while worker.num_started:
        results.append(worker.finish().rows)
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
            worker.begin(next_step(step + 2, 0))
    assert found == alone


def test_a_pass_takes_its_tokens_from_the_one_before_it(toy: Path, num_threads: int) -> None:
    expected = [steps(make_worker(toy, num_threads), prompt, 12) for prompt in PROMPTS]
    worker = make_worker(toy, num_threads)
    found = chained_steps(worker, first_step(*PROMPTS), 11)
    tokens = [[row.token_ids for row in rows] for rows in zip(*found, strict=True)]
    assert tokens == [[row.token_ids for row in rows] for rows in expected]


def test_the_time_of_a_following_pass_counts_from_the_end_of_the_one_before(toy: Path, num_threads: int) -> None:
    """The pass runs while the host does something else, which must not make it look shorter."""
    worker = make_worker(toy, num_threads)
    worker.begin(first_step(*PROMPTS))
    worker.begin(next_step(2, 0, 1))
    start = time.perf_counter()
    worker.finish()
    time.sleep(0.05)
    times = worker.finish().times
    assert 0.05 <= times.forward <= time.perf_counter() - start


def test_only_the_same_requests_can_follow_before_the_result_is_there(toy: Path, num_threads: int) -> None:
    worker = make_worker(toy, num_threads)
    worker.begin(first_step(*PROMPTS))
    assert worker.can_begin(next_step(2, 0, 1))
    assert not worker.can_begin(next_step(2, 0))
    assert not worker.can_begin(next_step(2, 1, 0))
    worker.begin(next_step(2, 0, 1))
    assert not worker.can_begin(next_step(3, 0, 1))
    worker.finish()
    assert worker.can_begin(next_step(3, 0, 1))
    worker.finish()
    assert worker.can_begin(next_step(3, 0))


def test_a_pass_whose_requests_have_all_ended_leaves_nothing_behind(toy: Path, num_threads: int) -> None:
    """Again and again, because the next step may find it wherever it happens to be."""
    [prompt, other] = PROMPTS
    worker = make_worker(toy, num_threads)
    [last] = steps(make_worker(toy, num_threads), prompt, 1)[0].token_ids
    for _ in range(50):
        [[ended], [none]] = chained_steps(worker, first_step(prompt, ends_first=[last]), 1)
        assert (ended.token_ids, ended.is_deferred) == ([last], False)
        assert (none.token_ids, none.is_deferred) == ([], True)
        worker.execute(StepPlan(3, [0], [], []))
    assert chained_steps(worker, first_step(other), 5) == chained_steps(
        make_worker(toy, num_threads), first_step(other), 5
    )


def test_a_request_that_ended_does_not_go_on_where_another_does(toy: Path, num_threads: int) -> None:
    alone = chained_steps(make_worker(toy, num_threads), first_step(*PROMPTS), 3)
    ends, _ = alone[0]
    found = chained_steps(make_worker(toy, num_threads), first_step(*PROMPTS, ends_first=ends.token_ids), 3)
    assert [row for _, row in found] == [row for _, row in alone]
    assert [row.is_deferred for row, _ in found] == [False, True, True, True]


def test_logits_that_are_not_finite_end_a_request_before_its_next_pass_is_read(toy: Path, num_threads: int) -> None:
    worker = make_worker(toy, num_threads)
    bad = 30
    worker.model.embedding.weight[bad] = float("nan")
    found = chained_steps(worker, first_step([bad, *PROMPTS[0]], PROMPTS[1]), 2)
    expected = chained_steps(make_worker(toy, num_threads), first_step(*PROMPTS), 2)
    assert [row for _, row in found] == [row for _, row in expected]
    assert [row.error is not None for row, _ in found] == [True, False, False]
    assert [row.is_deferred for row, _ in found] == [False, True, True]


@pytest.mark.parametrize("follows", [False, True])
def test_a_worker_may_be_dropped_while_its_pass_runs(toy: Path, num_threads: int, follows: bool) -> None:
    for _ in range(10):
        worker = make_worker(toy, num_threads)
        worker.begin(first_step(PROMPTS[0]))
        if follows:
            worker.begin(next_step(2, 0))
            worker.finish()
        runner = weakref.ref(worker.backend.runner)
        del worker
        gc.collect()
        assert runner() is None
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
    processor._SMALL = 0
    worker = make_worker(Path(os.environ["TOY"]), 2)
    worker.begin(first_step(PROMPTS[0]))
    return worker


def test_steps_in_graphs_begin_before_those_before_them_are_finished(toy: Path) -> None:
    """Of sampled requests too. A request that ended takes no part in the rest."""

    num_started: list[int] = []

    def results(ends_first: Sequence[int], is_chained: bool) -> list[list[RequestResult]]:
        worker, first = make_worker(toy, 1), first_step(*PROMPTS, [7, 8, 9], ends_first=ends_first)
        greedy, *others = first.new_requests
        sampled = [new._replace(sampling=new.sampling._replace(temperature=0.9, seed=3)) for new in others]
        if not is_chained:
            worker.can_begin = lambda _: not worker.num_started  # type: ignore[method-assign]
        num_started.clear()
        return chained_steps(worker, first._replace(new_requests=[greedy, *sampled]), 10, num_started)

    with recorded_graphs() as graphs:
        expected = results([], is_chained=False)
        assert set(num_started) == {1}
        tokens = [row.token_ids[0] for row, *_ in expected]
        last = next(place for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
        found = results([tokens[last]], is_chained=True)
    # The first step has prompts and no graph, and the step after the one that ends a request has other rows.
    assert num_started[1:last] == [2] * (last - 1)
    assert all({key[0] for key in recorded.replayed} == {"forward", "verify"} for recorded in graphs)  # type: ignore[index]
    assert [others for _, *others in found] == [others for _, *others in expected]
    assert [row for row, *_ in found[: last + 1]] == [row for row, *_ in expected[: last + 1]]
    assert [row.is_deferred for row, *_ in found[last + 1 :]] == [True] * (len(found) - last - 1)
