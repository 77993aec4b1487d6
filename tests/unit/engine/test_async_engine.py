"""The step loop's thread: callers on any thread, and each request ends exactly once, also when the ranks die."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from specray.config import EngineConfig
from specray.engine.async_engine import AsyncEngine
from specray.engine.engine import Engine
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, InvalidRequestError, QueueFullError
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import StepPlan, StepResult
from tests.unit.engine.fake_executor import FakeExecutor, continuation, letters_tokenizer, request

TIMEOUT = 10.0


class Inbox:
    """Takes deliveries in the loop's thread; `wait` blocks until enough requests have ended."""

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
    """Steps only while its gate is open; `fail` makes the next step raise."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, num_blocks=400, context_length=4000)
        self.limits = defaultdict(lambda: 4000)
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
        time.sleep(0.0005)  # lets the callers' threads in between steps
        return super().collect()


@contextmanager
def serving(**options: int) -> Iterator[tuple[AsyncEngine, GatedExecutor, Inbox]]:
    config = EngineConfig(**{"page_size": 16, **options})
    executor, inbox = GatedExecutor(config), Inbox()
    engine = AsyncEngine(Engine(config, executor, letters_tokenizer()), inbox)
    engine.start()
    try:
        yield engine, executor, inbox
    finally:
        executor.gate.set()
        engine.close()


def endless(seed: int) -> EngineRequest:
    """A request that is still running whenever a test wants to do something to it."""
    return EngineRequest(f"r{seed}", [2], SamplingParams(seed=seed, max_tokens=3000, ignore_eos=True))


def in_threads(count: int, act: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            act(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not errors, errors


def test_requests_of_many_threads_end_once_with_their_own_text() -> None:
    with serving(max_running_requests=8) as (engine, _, inbox):

        def submit(thread: int) -> None:
            for seed in range(thread * 10, thread * 10 + 10):
                engine.submit(request(seed, [2, seed % 7 + 3], max_tokens=8))

        in_threads(4, submit)
        inbox.wait(40)
        assert set(inbox.reasons) == {f"r{seed}" for seed in range(40)}
        for seed in range(40):
            assert inbox.tokens[f"r{seed}"] == continuation([2, seed % 7 + 3], 8)
        assert inbox.threads == {"specray-step"}


def test_aborts_from_other_threads_end_each_request_once() -> None:
    with serving(max_running_requests=4) as (engine, executor, inbox):

        def submit_and_abort(thread: int) -> None:
            for seed in range(thread * 5, thread * 5 + 5):
                engine.submit(endless(seed))
                engine.abort([f"r{seed}", "never seen"])
                engine.abort([f"r{seed}"])

        in_threads(4, submit_and_abort)
        inbox.wait(20)
        assert Counter(inbox.reasons.values()) == {FinishReason.ABORT: 20}
        engine.submit(request(99, [2], max_tokens=1))
        inbox.wait(21)
        assert executor.seeds in ([], [99])  # the aborted rows are gone


def test_an_abort_in_the_middle_keeps_what_was_said() -> None:
    with serving() as (engine, _, inbox):
        engine.submit(endless(0))
        inbox.wait_for_tokens("r0")
        engine.abort(["r0"])
        inbox.wait(1)
        [end] = inbox.ends
        assert end.finish_reason is FinishReason.ABORT
        assert end.usage.num_completion_tokens == len(inbox.tokens["r0"]) >= 1


def test_when_a_step_fails_everybody_is_told_and_nobody_is_let_in() -> None:
    with serving(max_running_requests=2) as (engine, executor, inbox):
        for seed in range(5):
            engine.submit(endless(seed))
        inbox.wait_for_tokens("r0")
        executor.error = EngineDeadError("rank 1 is gone")
        inbox.wait(5)
        assert set(inbox.reasons.values()) == {FinishReason.ERROR}
        assert {end.error for end in inbox.ends} == {"rank 1 is gone"}
        engine._thread.join(TIMEOUT)
        assert engine.error == "rank 1 is gone"
        with pytest.raises(EngineDeadError, match="rank 1 is gone"):
            engine.submit(endless(9))
        engine.abort(["r0"])  # too late, and no error


def test_what_arrives_while_the_last_step_fails_is_told_too() -> None:
    with serving() as (engine, executor, inbox):
        executor.gate.clear()
        engine.submit(endless(0))
        assert executor.is_stepping.wait(TIMEOUT)
        engine.submit(endless(1))
        engine.abort(["r0"])
        executor.error = RuntimeError("gone")
        executor.gate.set()
        inbox.wait(2)
        assert set(inbox.reasons) == {"r0", "r1"}


def test_an_error_without_words_is_told_by_its_name() -> None:
    with serving() as (engine, executor, inbox):
        executor.error = ZeroDivisionError()
        engine.submit(endless(0))
        inbox.wait(1)
        assert inbox.ends[0].error == "ZeroDivisionError"


def test_close_ends_what_is_in_flight_and_refuses_what_comes_later() -> None:
    with serving(max_running_requests=1) as (engine, _, inbox):
        for seed in range(3):
            engine.submit(endless(seed))
        inbox.wait_for_tokens("r0")
        engine.close()
        assert inbox.reasons == dict.fromkeys(["r0", "r1", "r2"], FinishReason.ERROR)
        assert all("shut down" in (end.error or "") for end in inbox.ends)
        with pytest.raises(EngineDeadError, match="shut"):
            engine.submit(endless(3))
        engine.close()


def test_the_queue_limit_counts_arrivals_the_loop_has_not_taken_yet() -> None:
    with serving(max_running_requests=1, max_queued_requests=2) as (engine, executor, inbox):
        executor.gate.clear()
        engine.submit(request(0, [2], max_tokens=1))
        assert executor.is_stepping.wait(TIMEOUT)  # r0 has the only slot, and the loop is busy with it
        for seed in (1, 2):
            engine.submit(request(seed, [2], max_tokens=1))
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.submit(request(3, [2], max_tokens=1))
        with pytest.raises(InvalidRequestError):  # refused for its own sake, and not counted with those
            engine.submit(request(4, []))
        executor.gate.set()
        inbox.wait(3)
        assert set(inbox.reasons) == {"r0", "r1", "r2"}
        assert engine.stats()["specray_requests_refused_total"] == 1


def test_a_bad_request_is_refused_in_the_callers_thread_and_disturbs_nobody() -> None:
    with serving() as (engine, executor, inbox):
        executor.gate.clear()
        engine.submit(request(0, [2], max_tokens=3))
        assert executor.is_stepping.wait(TIMEOUT)
        engine.submit(request(1, [2], max_tokens=3))
        for bad in (request(0, [2]), request(1, [2]), request(2, []), request(3, [2] * 4001)):  # taken, arriving, …
            with pytest.raises(InvalidRequestError):
                engine.submit(bad)
        executor.gate.set()
        inbox.wait(2)
        assert set(inbox.reasons) == {"r0", "r1"}


def test_a_snapshot_may_be_read_from_any_thread() -> None:
    with serving() as (engine, _, inbox):
        before = engine.stats()
        engine.submit(request(0, [2, 3, 4], max_tokens=2))
        inbox.wait(1)
        assert before["specray_prompt_tokens_total"] == 0
        assert engine.stats()["specray_prompt_tokens_total"] == 3
