"""The host's share of a step: `python -m benchmarks.overlap`, with ranks that only sleep.

The engine, its scheduler and detokenizer are real. A rank is a thread that takes a given time for a step and returns
one token a request. With two plans in flight it has the next plan before it finishes one, so a step should take the
rank's time and no more.
"""

import queue
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.executor import Capacity
from specray.engine.request import EngineRequest
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import SamplingParams
from specray.step import RequestResult, StepPlan, StepResult, StepTimes
from specray.tables import format_table

STEP_MS = (5, 10, 20)
BATCH_SIZES = (1, 32)
NUM_STEPS = 100
TOKENS = (504, 2534, 260, 1048, 282, 253)  # of ordinary text, again and again


class SleepingRank:
    """An Executor whose steps take `seconds` each, one after the other."""

    def __init__(self, seconds: float, max_plans: int) -> None:
        self.capacity = Capacity(4096, 0, 2048, 49152, [2], max_plans=max_plans)
        self._seconds = seconds
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        return self._results.get()

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            end = time.perf_counter() + self._seconds
            token = TOKENS[plan.step_id % len(TOKENS)]
            rows = [RequestResult(row.slot, [token], 0, None, None) for row in plan.rows]
            time.sleep(max(0.0, end - time.perf_counter()))
            self._results.put(StepResult(plan.step_id, rows, StepTimes(0.0, self._seconds, 0.0, 0.0)))


class Overlap(NamedTuple):
    step_ms: int
    batch_size: int
    one_plan: float  # time of a step / time of the rank
    two_plans: float


def measure(num_steps: int = NUM_STEPS) -> Iterator[Overlap]:
    for step_ms in STEP_MS:
        for batch_size in BATCH_SIZES:
            one, two = (_ratio(step_ms / 1e3, batch_size, max_plans, num_steps) for max_plans in (1, 2))
            yield Overlap(step_ms, batch_size, one, two)


def _ratio(seconds: float, batch_size: int, max_plans: int, num_steps: int) -> float:
    """The median time of a step, divided by the time of the same thread's sleep alone."""
    config = EngineConfig(max_running_requests=batch_size, disable_radix_cache=True)
    tokenizer = load_tokenizer(resolve_model(config.model, None, "auto", progress=False)).backend_tokenizer
    rank = SleepingRank(seconds, max_plans)
    engine = Engine(config, rank, tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 10, ignore_eos=True, seed=0)
    for index in range(batch_size):
        engine.add_request(EngineRequest(str(index), [5, 6, 7], params))
    for _ in range(5):
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    rank.close()
    return median(times) / seconds


def main() -> None:
    found = list(measure())
    rows = [[str(o.step_ms), str(o.batch_size), f"{o.one_plan:.3f}", f"{o.two_plans:.3f}"] for o in found]
    headers = ["rank, ms", "requests", "one plan at a time", "two plans in flight"]
    print(format_table(headers, rows, num_text_columns=0))


if __name__ == "__main__":
    main()
