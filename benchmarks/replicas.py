"""`python -m benchmarks.replicas`: throughput of two engines over that of one, toy model, steps 20 ms longer.

The pause stands for the work of a GPU, which two engines do at the same time. What limits the ratio is what they share:
the ingress and the CPU cores. Measured with whole replies and with streams, because each token of a stream is a message
to Serve's proxy and to the client.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cluster.config import AppConfig
from tests.chaos.ledger import Ending, Ledger
from tests.chaos.load import ask
from tests.chaos.questions import Question, make_questions
from tests.chaos.service import Service, Setting, started
from tests.support.processes import own_processes
from tests.support.toy import write_toy

ROUNDS, NUM_STREAMS, MAX_TOKENS = 3, 8, 150
KINDS = ("whole replies", "streams")


def main() -> None:
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy(Path(folder))
        questions = make_questions(model, MAX_TOKENS)
        with started(config(model, 1), Setting.VOLATILE, Path(folder)) as service:
            for number in range(2 * ROUNDS):
                engines = 1 + number % 2
                asyncio.run(scale(service, config(model, engines)))
                for kind in KINDS:
                    rate = asyncio.run(throughput(service, questions, engines, is_streamed=kind == "streams"))
                    rates[kind, engines].append(rate)
                    print(f"{engines} engines, {kind}: {rate:.0f} tokens/s", flush=True)
    for kind in KINDS:
        one, two = (sorted(rates[kind, engines])[ROUNDS // 2] for engines in (1, 2))
        print(f"two engines / one, {kind}, median of {ROUNDS}: {two / one:.2f}")


async def scale(service: Service, wanted: AppConfig) -> None:
    """Scale to the wanted number of engines, and slow their steps down."""
    if wanted != service.config:
        await asyncio.to_thread(service.deploy, wanted)
    while not await service.is_ready():
        await asyncio.sleep(0.2)
    for rank in own_processes("ray::TargetActor"):
        if rank not in SLOW:
            os.kill(rank, signal.SIGUSR2)
            SLOW.add(rank)


SLOW: set[int] = set()


async def throughput(service: Service, questions: Sequence[Question], engines: int, *, is_streamed: bool) -> float:
    """Tokens a second with enough clients to fill every engine."""
    ledger = Ledger()
    await asyncio.gather(*(ask(service.url, question, ledger) for question in questions[:2]))  # warm
    start = time.perf_counter()
    count = 4 * NUM_STREAMS * engines
    waiting = iter([questions[number % len(questions)] for number in range(count)])

    async def stream() -> None:
        for question in waiting:
            await ask(service.url, question, ledger, is_streamed=is_streamed)

    await asyncio.gather(*(stream() for _ in range(NUM_STREAMS * engines)))
    seconds = time.perf_counter() - start
    assert ledger.endings[Ending.COMPLETE] == count + 2, ledger.endings
    return count * MAX_TOKENS / seconds


def config(model: Path, engines: int) -> AppConfig:
    """Plain decoding, with as many running requests as streams."""
    return AppConfig.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "max_total_tokens": 16384,
            "max_running_requests": NUM_STREAMS,
            "max_queued_requests": 64,
            "server": {
                "num_replicas": engines,
                "num_ingress_replicas": 1,
                "router_cpus": 0.1,
                "rank_cpus": 0.6,
                "served_model_name": "chaos",
            },
        }
    )


if __name__ == "__main__":
    main()
