"""The loop of rank 0: steps begin before the ones before them are finished, if their plans are there."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.target import TargetActor
from specray.channel import Channel
from specray.config import EngineConfig
from specray.ops.cpu.library import kernels
from specray.step import DraftLimit, NewRequest, ScheduledRequest, StepPlan, StepResult
from specray.step_wire import pack, unpack_result
from specray.worker.startup import start_worker
from tests.support.distributions import OPTIONS
from tests.support.methods import METHODS

PAGE, NUM_PAGES, NUM_STEPS = 16, 8, 30
PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5, 6, 7]]
GREEDY = OPTIONS._replace(temperature=0.0, eos_token_ids=[])


def plans(limit: DraftLimit) -> Iterator[StepPlan]:
    new = [
        NewRequest(
            slot, prompt, len(prompt), 0, list(range(1 + NUM_PAGES * slot, 1 + NUM_PAGES * (slot + 1))), GREEDY, ""
        )
        for slot, prompt in enumerate(PROMPTS)
    ]
    yield StepPlan(1, [], new, [ScheduledRequest(slot, 100, limit, []) for slot in range(len(PROMPTS))])
    for number in range(2, NUM_STEPS + 1):
        yield StepPlan(number, [], [], [ScheduledRequest(slot, 1, limit, []) for slot in range(len(PROMPTS))])


class Rank:
    """A target actor whose loop runs in a thread, and which notes how many steps were started at each begin."""

    def __init__(self, folder: Path, tmp_path: Path, method: str | None, **options: Any) -> None:
        speculative = {} if method is None else {"speculative": METHODS[method](folder, tmp_path)}
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            page_size=PAGE,
            max_total_tokens=512,
            num_threads=1,
            **speculative,
            **options,
        )
        self.worker = start_worker(config)
        self.num_ahead = 0
        begin, worker = self.worker.begin, self.worker

        def noted(plan: StepPlan) -> None:
            self.num_ahead += worker.num_started
            begin(plan)

        self.worker.begin = noted  # type: ignore[method-assign]
        actor: Any = object.__new__(TargetActor)
        actor._worker, actor._config = self.worker, config
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, 1)
        self._thread = threading.Thread(target=actor._serve, args=[Channel(theirs, 1)])
        self._thread.start()

    def run(self, sent: Sequence[StepPlan], most: int, pause: float = 0.0) -> list[StepResult]:
        """The results of plans, of which `most` are sent before the result of the first of them is there."""
        results: list[StepResult] = []
        for number, plan in enumerate(sent):
            if number >= most:
                results.append(unpack_result(self.channel.recv(30.0)))
            time.sleep(pause)
            self.channel.send(pack(plan))
        while len(results) < len(sent):
            results.append(unpack_result(self.channel.recv(30.0)))
        return results

    def close(self) -> None:
        self.channel.close()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        self.worker.close()


def expected(folder: Path, tmp_path: Path, method: str | None, limit: DraftLimit) -> list[Any]:
    rank = Rank(folder, tmp_path, method, disable_overlap_schedule=True)
    try:
        results = rank.run(list(plans(limit)), most=1)
        assert rank.num_ahead == 0
    finally:
        rank.close()
    return [result.rows for result in results]


@pytest.mark.skipif(kernels() is None, reason="only the kernels begin steps early")
@pytest.mark.parametrize("method", ["EAGLE3", "PARALLEL"])
def test_steps_whose_plans_are_there_begin_early_with_the_same_results(method: str, toy: Path, tmp_path: Path) -> None:
    limit = DraftLimit(20, 20)
    rank = Rank(toy, tmp_path, method)
    try:
        results = rank.run(list(plans(limit)), most=2)
        assert [result.rows for result in results] == expected(toy, tmp_path, method, limit)
        assert rank.num_ahead >= NUM_STEPS // 2
    finally:
        rank.close()


@pytest.mark.parametrize("method", [None, "EAGLE3", "NGRAM"])
def test_plans_that_come_late_are_run_all_the_same(method: str | None, toy: Path, tmp_path: Path) -> None:
    limit = DraftLimit(0, 0) if method is None else DraftLimit(20, 20)
    rank = Rank(toy, tmp_path, method)
    try:
        results = rank.run(list(plans(limit)), most=1, pause=0.004)
        assert [result.rows for result in results] == expected(toy, tmp_path, method, limit)
        assert rank.num_ahead == 0
    finally:
        rank.close()


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_the_loop_ends_with_the_connection_whatever_was_begun(num_waiting: int, toy: Path, tmp_path: Path) -> None:
    rank = Rank(toy, tmp_path, "EAGLE3")
    sent = list(plans(DraftLimit(20, 20)))
    rank.run(sent[:3], most=1)
    for plan in sent[3 : 3 + num_waiting]:
        rank.channel.send(pack(plan))
    rank.close()
