"""The thread of the step loop: concurrent callers, and exactly one end per request, even if the ranks fail."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine import async_engine
from specray.engine.async_engine import AsyncEngine
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.errors import EngineDeadError, InvalidRequestError, QueueFullError
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import StepPlan, StepResult
from tests.support.processes import wait_until
from tests.unit.engine.fake_executor import FakeExecutor, continuation, letters_tokenizer, request

TIMEOUT = 10.0


class OutputCollector:
    """Collects outputs in the loop's thread."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: list[RequestOutput] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            for output in outputs:
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.ends.append(output)
            self._changed.notify_all()

    def wait(self, num_ended: int) -> None:
        """Block until `num_ended` requests have ended."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.ends) >= num_ended, TIMEOUT)
        assert done, f"{len(self.ends)} of {num_ended} ended"

    def wait_for_tokens(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.tokens[request_id]), TIMEOUT)

    @property
    def reasons(self) -> dict[str, FinishReason | None]:
        assert len({end.request_id for end in self.ends}) == len(self.ends), "a request ended twice"
        return {end.request_id: end.finish_reason for end in self.ends}


class GatedExecutor(FakeExecutor):
    """Runs steps only while `gate` is set; `error` makes the next step fail."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, num_blocks=400, context_length=4000)
        self.max_lengths = defaultdict(lambda: 4000)
        self.gate = threading.Event()
        self.gate.set()
        self.is_stepping = threading.Event()
        self.error: Exception | None = None

    def submit(self, plan: StepPlan) -> None:
        self.is_stepping.set()
        assert self.gate.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        super().submit(plan)

    def collect(self) -> StepResult:
        time.sleep(0.0005)  # lets other threads run between steps
        return super().collect()


@contextmanager
def serving(**options: int) -> Iterator[tuple[AsyncEngine, GatedExecutor, OutputCollector]]:
    config = EngineConfig(**{"page_size": 16, **options})
    executor, outputs = GatedExecutor(config), OutputCollector()
    engine = AsyncEngine(Engine(config, executor, letters_tokenizer()), outputs)
    engine.start()
    try:
        yield engine, executor, outputs
    finally:
        executor.gate.set()
        engine.close()


def long_request(seed: int) -> EngineRequest:
    """A request that does not end during a test."""
    return EngineRequest(f"r{seed}", [2], SamplingParams(seed=seed, max_tokens=3000, ignore_eos=True))


def run_in_threads(count: int, function: Callable[[int], None]) -> None:
    """Call `function` with 0 … `count` - 1, each in its own thread."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            function(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not errors, errors


def test_calls_run_in_the_order_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that follows a new drafter is planned for it, also if the loop wakes up only after both."""
    config, ran = EngineConfig(page_size=16), list[str]()
    engine = Engine(config, GatedExecutor(config), letters_tokenizer())
    for part, name in ((engine.drafter, "replace"), (engine.requests, "enqueue")):
        method = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *given, name=name, method=method: (ran.append(name), method(*given)))
    outputs = OutputCollector()
    waiting = AsyncEngine(engine, outputs)
    waiting.submit(request(0, [2], max_tokens=2))
    waiting.draft_with(config.speculative, 0)
    waiting.submit(request(1, [2], max_tokens=2))
    waiting.start()
    outputs.wait(2)
    waiting.close()
    assert ran == ["enqueue", "replace", "enqueue"]


def test_requests_from_several_threads_end_once_with_their_own_output() -> None:
    with serving(max_running_requests=8) as (engine, _, outputs):

        def submit(thread: int) -> None:
            for seed in range(thread * 10, thread * 10 + 10):
                engine.submit(request(seed, [2, seed % 7 + 3], max_tokens=8))

        run_in_threads(4, submit)
        outputs.wait(40)
        assert set(outputs.reasons) == {f"r{seed}" for seed in range(40)}
        for seed in range(40):
            assert outputs.tokens[f"r{seed}"] == continuation([2, seed % 7 + 3], 8)
        assert outputs.threads == {"specray-step"}


def test_aborts_from_other_threads_end_each_request_once() -> None:
    with serving(max_running_requests=4) as (engine, executor, outputs):

        def submit_and_abort(thread: int) -> None:
            for seed in range(thread * 5, thread * 5 + 5):
                engine.submit(long_request(seed))
                engine.abort([f"r{seed}", "unknown"])
                engine.abort([f"r{seed}"])

        run_in_threads(4, submit_and_abort)
        outputs.wait(20)
        assert Counter(outputs.reasons.values()) == {FinishReason.ABORT: 20}
        engine.submit(request(99, [2], max_tokens=1))
        outputs.wait(21)
        assert executor.seeds in ([], [99])  # the aborted rows were freed


def test_an_aborted_request_keeps_the_tokens_generated_so_far() -> None:
    with serving() as (engine, _, outputs):
        engine.submit(long_request(0))
        outputs.wait_for_tokens("r0")
        engine.abort(["r0"])
        outputs.wait(1)
        [end] = outputs.ends
        assert end.finish_reason is FinishReason.ABORT
        assert end.usage.num_completion_tokens == len(outputs.tokens["r0"]) >= 1


def test_a_failed_step_ends_every_request_and_refuses_new_ones() -> None:
    with serving(max_running_requests=2) as (engine, executor, outputs):
        for seed in range(5):
            engine.submit(long_request(seed))
        outputs.wait_for_tokens("r0")
        executor.error = EngineDeadError("rank 1 exited")
        outputs.wait(5)
        assert set(outputs.reasons.values()) == {FinishReason.ERROR}
        assert {end.error for end in outputs.ends} == {"rank 1 exited"}
        engine._thread.join(TIMEOUT)
        assert engine.error == "rank 1 exited"
        with pytest.raises(EngineDeadError, match="rank 1 exited"):
            engine.submit(long_request(9))
        engine.abort(["r0"])  # has no effect


def test_requests_that_arrive_during_a_failing_step_are_ended() -> None:
    with serving() as (engine, executor, outputs):
        executor.gate.clear()
        engine.submit(long_request(0))
        assert executor.is_stepping.wait(TIMEOUT)
        engine.submit(long_request(1))
        engine.abort(["r0"])
        executor.error = RuntimeError("rank 1 exited")
        executor.gate.set()
        outputs.wait(2)
        assert set(outputs.reasons) == {"r0", "r1"}


class PanicError(BaseException):
    """As pyo3 raises it when Rust code fails, such as a tokenizer's."""


@pytest.mark.parametrize("error", [MemoryError("no room"), PanicError("index out of bounds"), SystemExit(3)])
def test_any_error_of_the_step_loop_ends_all_requests(error: BaseException) -> None:
    with serving() as (engine, executor, outputs):
        executor.error = error  # type: ignore[assignment]
        engine.submit(long_request(0))
        outputs.wait(1)
        assert outputs.ends[0].error == engine.error == str(error)


def test_an_error_without_a_message_is_reported_by_its_type() -> None:
    with serving() as (engine, executor, outputs):
        executor.error = ZeroDivisionError()
        engine.submit(long_request(0))
        outputs.wait(1)
        assert outputs.ends[0].error == "ZeroDivisionError"


def test_close_ends_running_requests_and_refuses_new_ones() -> None:
    with serving(max_running_requests=1) as (engine, _, outputs):
        for seed in range(3):
            engine.submit(long_request(seed))
        outputs.wait_for_tokens("r0")
        engine.close()
        assert outputs.reasons == dict.fromkeys(["r0", "r1", "r2"], FinishReason.ERROR)
        assert all("shut down" in (end.error or "") for end in outputs.ends)
        with pytest.raises(EngineDeadError, match="shut"):
            engine.submit(long_request(3))
        engine.close()


def test_the_queue_limit_includes_requests_that_the_loop_has_not_received() -> None:
    with serving(max_running_requests=1, max_queued_requests=2) as (engine, executor, outputs):
        executor.gate.clear()
        engine.submit(request(0, [2], max_tokens=1))
        assert executor.is_stepping.wait(TIMEOUT)  # r0 has the only slot, and its step is running
        for seed in (1, 2):
            engine.submit(request(seed, [2], max_tokens=1))
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.submit(request(3, [2], max_tokens=1))
        with pytest.raises(InvalidRequestError):  # invalid: not counted as refused for lack of room
            engine.submit(request(4, []))
        executor.gate.set()
        outputs.wait(3)
        assert set(outputs.reasons) == {"r0", "r1", "r2"}
        assert engine.stats()["specray_requests_refused_total"] == 1


def test_an_invalid_request_is_refused_in_the_callers_thread_without_effect_on_others() -> None:
    with serving() as (engine, executor, outputs):
        executor.gate.clear()
        engine.submit(request(0, [2], max_tokens=3))
        assert executor.is_stepping.wait(TIMEOUT)
        engine.submit(request(1, [2], max_tokens=3))
        # ids of a running and of an arriving request, an empty and a long prompt
        for bad in (request(0, [2]), request(1, [2]), request(2, []), request(3, [2] * 4001)):
            with pytest.raises(InvalidRequestError):
                engine.submit(bad)
        executor.gate.set()
        outputs.wait(2)
        assert set(outputs.reasons) == {"r0", "r1"}


def test_statistics_can_be_read_from_another_thread() -> None:
    with serving() as (engine, _, outputs):
        before = engine.stats()
        engine.submit(request(0, [2, 3, 4], max_tokens=2))
        outputs.wait(1)
        assert before["specray_prompt_tokens_total"] == 0
        assert engine.stats()["specray_prompt_tokens_total"] == 3


@pytest.mark.parametrize("broken", ["enqueue", "fail_all", "update_gauges"])
def test_every_request_ends_once_though_the_engine_itself_fails(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose arrival raised was in no list and never ended, nor did the others if ending them raised."""
    submitted = [long_request(1), long_request(2), long_request(3)]
    with serving() as (engine, executor, outputs):
        engine.submit(submitted[0])
        outputs.wait_for_tokens("r1")
        with engine._changed:  # the loop waits for it between two steps
            part = engine._engine.requests if broken == "enqueue" else engine._engine
            monkeypatch.setattr(part, broken, Mock(side_effect=RuntimeError("broken")))
            if broken == "fail_all":
                executor.error = RuntimeError("broken")
            engine.submit(submitted[1])
            engine.submit(submitted[2])
        outputs.wait(3)
    assert outputs.reasons == {request.request_id: FinishReason.ERROR for request in submitted}
    assert {end.error for end in outputs.ends} == {"broken"}


def test_a_request_whose_arrival_fails_is_the_one_that_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those that are computed, or that arrive after it."""
    with serving() as (engine, _, outputs):
        engine.submit(long_request(1))
        outputs.wait_for_tokens("r1")
        with engine._changed:
            add = engine._engine.scheduler.add
            monkeypatch.setattr(engine._engine.scheduler, "add", Mock(side_effect=[RuntimeError("broken"), add]))
            engine.submit(long_request(2))
            engine.submit(long_request(3))
        outputs.wait(3)
        assert [blamed.request_id for blamed in engine.computing] == ["r2"]


def test_no_caller_waits_for_a_flush_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (engine, _, outputs):
        is_flushing, may_go_on = threading.Event(), threading.Event()

        def slow(_: int) -> None:
            is_flushing.set()
            assert may_go_on.wait(TIMEOUT)

        monkeypatch.setattr(engine._engine.scheduler.cache, "evict", slow)
        engine.flush_cache()
        assert is_flushing.wait(TIMEOUT)
        submitting = threading.Thread(target=engine.submit, args=(request(0, [2], max_tokens=2),))
        submitting.start()
        submitting.join(TIMEOUT)
        assert not submitting.is_alive()
        may_go_on.set()
        outputs.wait(1)


def test_a_flush_of_a_large_cache_lets_steps_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "FLUSHED_BLOCKS", 2)
    prompt = [2 + number % 7 for number in range(130)]  # eight blocks
    with serving() as (engine, _, outputs):
        scheduler = engine._engine.scheduler
        engine.submit(request(0, prompt, max_tokens=2))
        outputs.wait(1)
        evict, evicted = scheduler.cache.evict, dict[int, int]()  # blocks by number of the step before

        def recorded(num_blocks: int) -> None:
            evicted[scheduler._num_steps] = num_blocks
            evict(num_blocks)

        monkeypatch.setattr(scheduler.cache, "evict", recorded)
        engine.submit(long_request(1))
        outputs.wait_for_tokens("r1")
        engine.flush_cache()
        wait_until(lambda: not scheduler.cache.num_idle, TIMEOUT)
        assert list(evicted.values()) == [2, 2, 2, 2]
        engine.submit(request(2, prompt, max_tokens=2))
        outputs.wait(2)
        assert [end.usage.num_cached_tokens for end in outputs.ends] == [0, 0]


def test_learnt_costs_are_read_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (engine, _, outputs):
        new_budget, threads = engine._engine.drafter.new_budget, []

        def recorded(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return new_budget(*given)

        monkeypatch.setattr(engine._engine.drafter, "new_budget", recorded)
        before = engine._engine.scheduler.drafts.budget
        engine.draft_with(SpeculativeConfig(algorithm="NGRAM"), 3)
        engine.submit(request(0, [2], max_tokens=2))
        outputs.wait(1)
        assert engine._engine.scheduler.drafts.budget is not before
        assert threads == [threading.main_thread().name]
