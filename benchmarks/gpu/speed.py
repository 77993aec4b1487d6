"""The part `speed`: decode steps of random weights, with acceptance simulated, eager and in graphs.

A step is that of one rank, without the engine around it, whose work is hidden behind the rank's (see `served`). It
has two plans in flight, as from an engine in the same process: in plain decoding a step begins before the one before it
is finished. The text is meaningless; the times are not.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.random_model import LLAMA_8B, ModelSize, make_target, write_head
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.report import Cell, Order, Report, requests
from specray.config import EngineConfig, SpeculativeConfig
from specray.step import UNLIMITED, DraftLimit, NewRequest, SamplingOptions, ScheduledRequest, StepPlan
from specray.worker import buckets
from specray.worker.startup import start_worker
from specray.worker.worker import Worker

PAGE = 16
WARM_UP, PROFILED = 5, 3  # steps
GREEDY = SamplingOptions(0, 0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, [], None)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Variant(NamedTuple):
    """A way to decode, with `accept_length` tokens a step."""

    name: str
    chain: int  # levels of drafts; 0: none
    accept_length: float
    goal: float | None  # tokens/s of one request, in graphs
    topk: int = 1  # children of a node
    nodes: int | None = None  # of a tree, the root included; None: a chain
    reached: float | None = None  # tokens a step, where the simulated walk through a tree ends earlier
    limit: DraftLimit = UNLIMITED  # of each request, as a budget sets it

    @property
    def title(self) -> str:
        return f"{self.name}, {self.reached or self.accept_length:.1f} tokens a step" if self.chain else self.name

    @property
    def num_nodes(self) -> int:
        return self.nodes or self.chain + 1


VARIANTS = [
    Variant("plain", 0, 1.0, 230),
    Variant("chain of 3", 3, 2.9, None),
    Variant("chain of 5", 5, 3.5, None),
    Variant("chain of 7", 7, 3.9, 600),
    Variant("chain of 7", 7, 5.4, 850),
    Variant("tree of 16 (5-4-16)", 5, 3.9, None, topk=4, nodes=16, reached=3.0),
]
TINY_VARIANTS = [VARIANTS[0], Variant("tree of 6", 3, 2.9, None, topk=2, nodes=6)]
BATCH_SIZES: tuple[int, ...] = (1, 8, 64)
TABLE = (
    "Decode steps of an 8B model with random weights, tokens a second (prompts of 128 tokens, accept length simulated)"
)
GOAL_OF_BATCHES = 1.6  # times plain decoding, in graphs, in the largest batch


class Setting(NamedTuple):
    """What the parts with whole engines measure."""

    size: ModelSize
    variants: list[Variant]
    batch_sizes: tuple[int, ...]
    num_steps: int
    prompt: int  # tokens


class Speed(NamedTuple):
    """One measurement."""

    variant: Variant
    in_graphs: bool
    batch_size: int
    tokens_per_s: float
    step_ms: float
    tokens_per_step: float  # of a request
    launches: float | None  # calls of the host in a step; None: not counted on a CPU
    waits: float | None


def report(order: Order) -> Report:
    size, variants, batch_sizes, steps, prompt = LLAMA_8B, VARIANTS, BATCH_SIZES, 100, 128
    if order.is_tiny:
        size, variants, batch_sizes, steps, prompt = TINY_MODEL, TINY_VARIANTS, (1, 2), 3, 8
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for each in order.time_limit.in_time(
            measure(Path(folder), size, order.device, variants, batch_sizes, steps, prompt)
        ):
            found.append(each)
            print(", ".join(table_rows([each])[0]), flush=True)  # minutes pass before the table
    note = f"{size.name}, prompts of {prompt} tokens, {steps} steps; goals are for an H200"
    return Report(HEADERS, table_rows(found), 1, note, cells(found))


def cells(found: list[Speed]) -> list[Cell]:
    """Speeds of steps in graphs, and of plain steps without them."""
    shown = []
    for speed in found:
        if not speed.in_graphs and speed.variant.chain:
            continue
        row = speed.variant.title if speed.in_graphs else f"{speed.variant.title}, kernels launched one by one"
        goal = goal_of(speed, found)
        shown.append(Cell(TABLE, row, requests(speed.batch_size), speed.tokens_per_s, "{:,.0f}", goal))
    return shown


def measure(
    folder: Path,
    size: ModelSize,
    device: torch.device,
    variants: Sequence[Variant],
    batch_sizes: Sequence[int],
    num_steps: int,
    prompt: int,
    graphs: Sequence[bool] = (False, True),
) -> Iterator[Speed]:
    """All variants on one target, with steps in graphs or not. `prompt` is the number of tokens of a prompt."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_target(folder, size, dtype, device)
    head = write_head(folder / "head", size, dtype, device)
    with _captured_for(batch_sizes):
        for variant in variants:
            for in_graphs in graphs:
                config = config_of(folder, head, device, variant, in_graphs, max(batch_sizes), prompt, num_steps)
                steps = Steps(start_worker(config, model=model), size, prompt)
                for batch_size in batch_sizes:
                    yield steps.measure(variant, in_graphs, batch_size, num_steps)


@contextmanager
def _captured_for(batch_sizes: Sequence[int]) -> Iterator[None]:
    """Workers capture graphs for these numbers of requests only: capturing all takes longer than measuring."""
    target, drafter = buckets.buckets, buckets.draft_buckets

    def taken(max_rows: int, max_nodes: int) -> list[buckets.Bucket]:
        return [bucket for bucket in target(max_rows, max_nodes) if bucket.nodes > 1 or bucket.rows in batch_sizes]

    def drafted(max_rows: int, max_nodes: int) -> list[buckets.Bucket]:
        return [bucket for bucket in drafter(max_rows, max_nodes) if bucket.rows in batch_sizes]

    with (
        mock.patch("specray.worker.decode_graphs.buckets", taken),
        mock.patch("specray.worker.decode_graphs.draft_buckets", drafted),
    ):
        yield


def config_of(
    folder: Path,
    head: Path,
    device: torch.device,
    variant: Variant,
    in_graphs: bool,
    max_rows: int,
    prompt: int,
    num_steps: int,
) -> EngineConfig:
    speculative = SpeculativeConfig()
    if variant.chain:
        speculative = SpeculativeConfig(
            algorithm="EAGLE3",
            draft_model_path=str(head),
            num_steps=variant.chain,
            eagle_topk=variant.topk,
            num_draft_tokens=variant.num_nodes,
            simulate_accept_length=variant.accept_length,
            simulate_output_is_meaningless=True,
        )
    return EngineConfig(
        model=str(folder),
        device=device.type,
        dtype="bfloat16" if device.type == "cuda" else "float32",
        page_size=PAGE,
        max_running_requests=max_rows,
        max_total_tokens=max_rows * most_tokens(variant, prompt, num_steps),
        disable_cuda_graph=not in_graphs,
        speculative=speculative,
    )


def most_tokens(variant: Variant, prompt: int, num_steps: int) -> int:
    """KV slots of a request, whole pages."""
    most = prompt + (WARM_UP + PROFILED + num_steps + 2) * (variant.chain + 1) + variant.num_nodes
    return -(-most // PAGE) * PAGE


class Steps:
    """A worker and its requests, all of which decode."""

    def __init__(self, worker: Worker, size: ModelSize, prompt: int) -> None:
        self._worker, self._size, self._prompt = worker, size, prompt
        self._num_steps, self._limit = 0, UNLIMITED

    def measure(self, variant: Variant, in_graphs: bool, batch_size: int, num_steps: int) -> Speed:
        self._limit = variant.limit
        self._enter(batch_size, most_tokens(variant, self._prompt, num_steps) // PAGE)
        device = self._worker.model.embedding.weight.device
        for _ in range(WARM_UP):
            self._step(batch_size)
        self._finish_all()
        counts = self._count(batch_size) if device.type == "cuda" else (None, None)
        _wait(device)
        start = time.perf_counter()
        num_tokens = sum(self._step(batch_size) for _ in range(num_steps)) + self._finish_all()
        _wait(device)
        seconds = time.perf_counter() - start
        per_step = num_tokens / num_steps / batch_size
        self._run([], [], freed=list(range(batch_size)))
        self._finish_all()
        return Speed(variant, in_graphs, batch_size, num_tokens / seconds, 1e3 * seconds / num_steps, per_step, *counts)

    def _enter(self, batch_size: int, num_blocks: int) -> None:
        """Prompts of different tokens, one request a step."""
        for slot in range(batch_size):
            tokens = [(7 * slot + place) % self._size.vocab for place in range(self._prompt)]
            blocks = list(range(1 + slot * num_blocks, 1 + (slot + 1) * num_blocks))
            new = NewRequest(slot, tokens, len(tokens), 0, blocks, GREEDY._replace(seed=slot), "")
            self._run([slot], [new])

    def _step(self, batch_size: int) -> int:
        """Begin a decode step of all requests; returns the number of tokens of what was finished for that."""
        return self._run(list(range(batch_size)), [])

    def _run(self, slots: list[int], new: list[NewRequest], freed: Sequence[int] = ()) -> int:
        self._num_steps += 1
        rows = [ScheduledRequest(slot, self._prompt, self._limit, []) for slot in slots]
        plan, num_tokens = StepPlan(self._num_steps, list(freed), new, rows), 0
        if not self._worker.can_begin(plan):
            num_tokens += self._finish()
        self._worker.begin(plan)
        return num_tokens + (self._finish() if self._worker.num_started > 1 else 0)

    def _finish(self) -> int:
        """Finish the oldest step; returns the number of its tokens."""
        result = self._worker.finish()
        self._worker.propose()
        return sum(len(row.token_ids) for row in result.rows)

    def _finish_all(self) -> int:
        num_tokens = 0
        while self._worker.num_started:
            num_tokens += self._finish()
        return num_tokens

    def _count(self, batch_size: int) -> tuple[float, float]:
        """(launches, waits) of the host in a step."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(PROFILED):
                self._step(batch_size)
            self._finish_all()
        names = Counter(event.name for event in profile.events() or [])
        launches, waits = (sum(names[name] for name in group) / PROFILED for group in (LAUNCHES, WAITS))
        return launches, waits


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HEADERS = ["variant", "launched", "requests", "tokens/s", "step, ms", "tokens a step", "launches", "waits", "goal"]


def table_rows(found: list[Speed]) -> list[list[str]]:
    """One row a measurement, with the goal beside the measurements that have one."""
    return [
        [
            f"{speed.variant.name}, {speed.variant.accept_length:g}" if speed.variant.chain else speed.variant.name,
            "graphs" if speed.in_graphs else "eager",
            str(speed.batch_size),
            f"{speed.tokens_per_s:.0f}",
            f"{speed.step_ms:.2f}",
            f"{speed.tokens_per_step:.2f}",
            "-" if speed.launches is None else f"{speed.launches:.0f}",
            "-" if speed.waits is None else f"{speed.waits:.0f}",
            _goal(speed, found),
        ]
        for speed in found
    ]


def goal_of(speed: Speed, found: list[Speed]) -> float | None:
    """Tokens/s that this measurement should reach; None without a goal."""
    if not speed.in_graphs:
        return None
    goal = speed.variant.goal if speed.batch_size == 1 else None
    if speed.batch_size == BATCH_SIZES[-1] and speed.variant.chain:
        plain = next(
            (each for each in found if each[1:3] == speed[1:3] and not each.variant.chain and each.in_graphs), None
        )
        goal = GOAL_OF_BATCHES * plain.tokens_per_s if plain else None
    return goal


def _goal(speed: Speed, found: list[Speed]) -> str:
    goal = goal_of(speed, found)
    return "" if goal is None else f">= {goal:.0f}{'' if speed.tokens_per_s >= goal else ' (missed)'}"
