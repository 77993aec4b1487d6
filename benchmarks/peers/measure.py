"""What is measured, in which order, and the medians and ratios of the times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple, Protocol

from benchmarks.peers.engines import COPYING, EIGHT, ONE, PREFILL, Ratio
from benchmarks.peers.worker_process import WorkerError
from benchmarks.peers.workers.protocol import Answer

PREFILL_TOKENS = 1000
CONCURRENCY = 8
WARM_UP_TOKENS = 16


class Workload(NamedTuple):
    """Batches of prompts, as token ids, and the length of the answers."""

    name: str
    batches: list[list[list[int]]]
    max_tokens: int

    @property
    def batch_size(self) -> int:
        return max(len(batch) for batch in self.batches)

    def num_tokens(self, batch: Sequence[Sequence[int]]) -> int:
        """Tokens that count for the speed: the prompt's for prefill, else the answers'."""
        return len(batch[0]) if self.name == PREFILL else len(batch) * self.max_tokens


class Sample(NamedTuple):
    engine: str
    workload: str
    batch: int
    round: int
    tokens_per_s: float
    ttft: float


class Worker(Protocol):
    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer: ...


def workloads(chat: list[list[int]], copying: list[list[int]], max_tokens: int, num_prefills: int) -> list[Workload]:
    """All workloads from two kinds of prompts. Prefill reads pieces of all prompts, joined."""
    num_batches = -(-len(chat) // CONCURRENCY)
    filled = list(islice(cycle(chat), num_batches * CONCURRENCY))
    text = [token for prompt in [*copying, *chat] for token in prompt]
    pieces = [list(islice(cycle(text), start, start + PREFILL_TOKENS)) for start in _starts(num_prefills)]
    return [
        Workload(ONE, [[prompt] for prompt in chat], max_tokens),
        Workload(COPYING, [[prompt] for prompt in copying], max_tokens),
        Workload(EIGHT, [filled[i : i + CONCURRENCY] for i in range(0, len(filled), CONCURRENCY)], max_tokens),
        Workload(PREFILL, [[piece] for piece in pieces], 1),
    ]


def measure(
    workers: Mapping[str, Worker],
    max_batches: Mapping[str, int],
    plan: Sequence[Workload],
    num_rounds: int,
    failed: Callable[[str, str], None],
    advance: Callable[[str, str], None] = lambda *_: None,
) -> list[Sample]:
    """Every workload on every worker that takes its batches. Workers take turns batch by batch; only one is busy.

    A worker that fails is reported to `failed` with the reason, and is asked nothing more.
    """
    alive = dict(workers)
    samples: list[Sample] = []
    for workload in plan:
        able = [name for name in workers if max_batches[name] >= workload.batch_size]
        for name, batch, round_ in _turns(able, workload, num_rounds):
            if name not in alive:
                continue
            advance(name, workload.name)
            try:
                if round_ is None:
                    alive[name].ask(workload.batches[batch], min(WARM_UP_TOKENS, workload.max_tokens))
                else:
                    samples.append(_sample(name, alive[name], workload, batch, round_))
            except WorkerError as error:
                del alive[name]
                failed(name, str(error))
    return samples


def num_turns(max_batches: Mapping[str, int], plan: Sequence[Workload], num_rounds: int) -> int:
    """How often `measure` calls `advance` if no worker fails."""
    return sum(
        1 + num_rounds * len(workload.batches)
        for workload in plan
        for size in max_batches.values()
        if size >= workload.batch_size
    )


def medians(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """workload -> engine -> median tokens per second."""
    return _medians(samples, lambda sample: sample.tokens_per_s)


def median_ttft(samples: Sequence[Sample]) -> dict[str, float]:
    """engine -> median seconds to the first token of one request."""
    return _medians(samples, lambda sample: sample.ttft).get(ONE, {})


def ratio(samples: Sequence[Sample], workload: str, ours: str, theirs: str) -> float | None:
    """Median of the ratios of speeds on the same batch in the same round; None without such pairs."""
    speeds = {(s.engine, s.batch, s.round): s.tokens_per_s for s in samples if s.workload == workload}
    pairs = [
        (speed, speeds[theirs, batch, round_])
        for (engine, batch, round_), speed in speeds.items()
        if engine == ours and (theirs, batch, round_) in speeds
    ]
    return median(mine / other for mine, other in pairs) if pairs else None


def fastest(speeds: Mapping[str, float], names: Sequence[str]) -> str | None:
    """The engine of `names` with the highest median; None if none was measured."""
    measured = [name for name in names if name in speeds]
    return max(measured, key=lambda name: speeds[name]) if measured else None


class Compared(NamedTuple):
    workload: str
    ours: str
    theirs: str
    ratio: float


def compared(samples: Sequence[Sample], ratios: Sequence[Ratio]) -> Iterator[Compared]:
    """The ratios that were measured."""
    speeds = medians(samples)
    for row in ratios:
        ours, theirs = (fastest(speeds.get(row.workload, {}), names) for names in (row.ours, row.theirs))
        value = ratio(samples, row.workload, ours, theirs) if ours and theirs else None
        if ours and theirs and value is not None:
            yield Compared(row.workload, ours, theirs, value)


def _turns(names: Sequence[str], workload: Workload, num_rounds: int) -> Iterator[tuple[str, int, int | None]]:
    """(worker, batch, round) in order, each worker's warm-up (round None) first. The first worker rotates."""
    for name in names:
        yield name, 0, None
    for round_ in range(num_rounds):
        for batch in range(len(workload.batches)):
            start = (batch + round_) % max(1, len(names))
            for name in [*names[start:], *names[:start]]:
                yield name, batch, round_


def _sample(name: str, worker: Worker, workload: Workload, batch: int, round_: int) -> Sample:
    prompts = workload.batches[batch]
    answer = worker.ask(prompts, workload.max_tokens)
    speed = workload.num_tokens(prompts) / answer.seconds
    return Sample(name, workload.name, batch, round_, speed, answer.ttft)


def _medians(samples: Sequence[Sample], value: Callable[[Sample], float]) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        groups.setdefault(sample.workload, {}).setdefault(sample.engine, []).append(value(sample))
    return {
        workload: {engine: median(values) for engine, values in by_engine.items()}
        for workload, by_engine in groups.items()
    }


def _starts(count: int) -> list[int]:
    """Where the pieces of text for prefill begin; odd steps, so that no two share a beginning."""
    return [number * 331 for number in range(count)]
