"""`python -m benchmarks.gpu overlap`: whole engine steps with one and with two plans in flight, of random weights.

The engine, its scheduler and detokenizer run as when served; the rank runs in a thread of its own. With two plans in
flight it has the next plan before it finishes one, so that a step takes the rank's time. A chain's drafts are accepted
at a simulated rate.
"""

import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu.random_model import LLAMA_8B, ModelSize, make_target, write_head
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.report import Cell, Report, requests
from benchmarks.gpu.speed import VARIANTS, Variant, config_of
from specray.engine.engine import Engine
from specray.engine.request import EngineRequest
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import SamplingParams
from specray.step import StepPlan, StepResult
from specray.worker.startup import start_worker
from specray.worker.worker import Worker

WARM_UP = 5  # steps
GOAL = 1.03  # time of a step with two plans in flight, over that of the rank


class Setting(NamedTuple):
    size: ModelSize
    variants: list[Variant]
    batch_sizes: tuple[int, ...]
    num_steps: int
    prompt: int  # tokens


FULL = Setting(LLAMA_8B, [VARIANTS[0], VARIANTS[3]], (1, 32), 100, 128)
TINY = Setting(TINY_MODEL, VARIANTS[:2], (2,), 5, 8)


class Overlap(NamedTuple):
    """Medians of steps of one engine."""

    variant: Variant
    num_plans: int
    batch_size: int
    tokens_per_s: float
    step_ms: float
    rank_ms: float

    @property
    def ratio(self) -> float:
        """The time of a step over the rank's part of it."""
        return self.step_ms / self.rank_ms


class ThreadedRank:
    """An Executor whose worker runs in a thread. `seconds` are the times of its steps, drafting included."""

    def __init__(self, worker: Worker, max_plans: int) -> None:
        self.capacity = worker.capacity._replace(max_plans=max_plans)
        self.seconds: list[float] = []
        self._worker = worker
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        device = self._worker.model.embedding.weight.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # it is the thread's
        while (plan := self._plans.get()) is not None:
            start = time.perf_counter()
            try:
                self._results.put(self._worker.execute(plan))
                self._worker.propose()
            except BaseException as error:
                self._results.put(error)
                return
            self.seconds.append(time.perf_counter() - start)


def report(device: torch.device, is_tiny: bool) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        found = list(measure(Path(folder), TINY if is_tiny else FULL, device))
    cells = [
        Cell(
            "Time of a step / the rank's time in it",
            f"{each.variant.title}, {requests(each.batch_size)}",
            "one plan" if each.num_plans == 1 else "two plans in flight",
            each.ratio,
            "{:.3f}",
            GOAL if each.num_plans == 2 else None,
            at_most=each.num_plans == 2,
        )
        for each in found
    ]
    return Report(HEADERS, table_rows(found), 1, "medians of steps", cells)


def measure(folder: Path, setting: Setting, device: torch.device) -> Iterator[Overlap]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, num_steps, prompt = setting.size, setting.num_steps, setting.prompt
    model = make_target(folder, size, dtype, device)
    head = write_head(folder / "head", size, dtype, device)
    tokenizer = load_tokenizer(folder).backend_tokenizer
    most = max(setting.batch_sizes)
    for variant in setting.variants:
        config = config_of(folder, head, device, variant, True, most, prompt, num_steps)
        worker = start_worker(config, model=model)
        for batch_size in setting.batch_sizes:
            for num_plans in (1, 2):
                rank = ThreadedRank(worker, num_plans)
                engine = Engine(config, rank, tokenizer)
                yield _measure(engine, rank, variant, num_plans, batch_size, setting)
                rank.close()


def _measure(
    engine: Engine, rank: ThreadedRank, variant: Variant, num_plans: int, batch_size: int, setting: Setting
) -> Overlap:
    length = (setting.num_steps + WARM_UP) * (variant.chain + 1)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, seed=0)
    for row in range(batch_size):
        tokens = [(7 * row + place) % setting.size.vocab for place in range(setting.prompt)]
        engine.add_request(EngineRequest(f"{row}-{num_plans}", tokens, params))
    for _ in range(WARM_UP):
        engine.step()
    rank.seconds.clear()
    times, num_tokens, start = [], 0, time.perf_counter()
    for _ in range(setting.num_steps):
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        num_tokens += sum(len(output.token_ids) for output in outputs)
    seconds = time.perf_counter() - start
    engine.abort([f"{row}-{num_plans}" for row in range(batch_size)])
    while engine.has_work:
        engine.step()
    rank_ms = 1e3 * median(rank.seconds)
    return Overlap(variant, num_plans, batch_size, num_tokens / seconds, 1e3 * median(times), rank_ms)


HEADERS = ["variant", "plans in flight", "requests", "tokens/s", "step, ms", "rank, ms", "step / rank", "goal"]


def table_rows(found: list[Overlap]) -> list[list[str]]:
    return [
        [
            each.variant.name,
            str(each.num_plans),
            str(each.batch_size),
            f"{each.tokens_per_s:.0f}",
            f"{each.step_ms:.2f}",
            f"{each.rank_ms:.2f}",
            f"{each.ratio:.3f}",
            f"<= {GOAL}" if each.num_plans == 2 else "",
        ]
        for each in found
    ]
