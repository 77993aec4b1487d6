"""`python -m benchmarks.long_prompts`: what a prompt of 8,000 tokens every two seconds costs short requests.

Four clients stream short answers of a small model from Ray Serve, first alone and then beside the long prompts. A round
has both phases, in an order that alternates. Printed are the medians over the rounds of the 99th percentiles of the
time to the first token and of the gaps between tokens, and of their ratios in one round.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from benchmarks.small_server import small_server
from specray.bench import machine
from specray.cli.arguments import positive
from specray.tables import format_table
from tests.support.stories import write_stories

NUM_CLIENTS, MAX_TOKENS = 4, 24
LONG_PROMPT, EVERY_S = 8000, 2.0
CONTEXT, VOCAB = 8448, 512
GOAL = 2.0


class Phase(NamedTuple):
    """Seconds of all requests of a phase."""

    first_tokens: list[float]
    gaps: list[float]

    def p99s(self) -> tuple[float, float]:
        return _p99(self.first_tokens), _p99(self.gaps)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="specray-long-") as folder, _server(Path(folder), options.chunk) as port:
        rounds = asyncio.run(_measure(f"http://127.0.0.1:{port}", options.rounds, options.requests))
    rows = []
    for place, name in enumerate(("time to the first token", "gap between tokens")):
        alone, beside = ([phases[number].p99s()[place] for phases in rounds] for number in (0, 1))
        ratios = sorted(after / before for before, after in zip(alone, beside, strict=True))
        cells = [f"{median(times) * 1000:.1f} ms" for times in (alone, beside)]
        rows.append([name, *cells, f"{median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    headers = ("p99", "alone", "beside long prompts", "ratio", "of rounds")
    print(f"{format_table(headers, rows)}\n\ngoal of the first row: {GOAL}\n{machine.one_line()}")
    if options.json is not None:
        document = {"columns": headers, "rows": rows, "machine": machine.describe_machine()}
        options.json.write_text(json.dumps(document | {"versions": machine.versions()}, indent=2) + "\n")
    return int(float(rows[0][3]) > GOAL)


@contextmanager
def _server(folder: Path, chunk: int | None) -> Iterator[int]:
    """The port of a server of a small model whose positions go far enough."""
    model = write_stories(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    sizes = {"max_total_tokens": 4 * CONTEXT, "max_running_requests": NUM_CLIENTS + 4}
    chunks = {} if chunk is None else {"chunked_prefill_size": chunk}
    with small_server(folder, model, **sizes, **chunks) as port:
        yield port


async def _measure(url: str, num_rounds: int, num_requests: int) -> list[tuple[Phase, Phase]]:
    """(alone, beside) of each round."""
    rounds = []
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await _ask(client, num_requests // 5, Phase([], []))  # warm
        for number in range(num_rounds):
            alone, beside = Phase([], []), Phase([], [])
            if number % 2 == 0:
                await _ask(client, num_requests, alone)
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(_send_long_prompts(client, random.Random(number)))
                await _ask(client, num_requests, beside)
                sending.cancel()
            if number % 2:
                await _ask(client, num_requests, alone)
            rounds.append((alone, beside))
    return rounds


async def _send_long_prompts(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One every EVERY_S, each new to the prefix cache, whether the one before it has ended or not."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            body = {"prompt": [rng.randrange(3, VOCAB) for _ in range(LONG_PROMPT)], "max_tokens": 1}
            tasks.create_task(_send(client, body))
            await asyncio.sleep(EVERY_S)


async def _send(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


async def _ask(client: httpx.AsyncClient, count: int, phase: Phase) -> None:
    """Send `count` requests in a row from each client."""

    async def one_client(number: int) -> None:
        for request in range(count):
            await _stream(client, f"Once upon a time {number} {request}", phase)

    await asyncio.gather(*(one_client(number) for number in range(NUM_CLIENTS)))


async def _stream(client: httpx.AsyncClient, prompt: str, phase: Phase) -> None:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": 1, "ignore_eos": True, "stream": True}
    before, is_first = time.perf_counter(), True
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                (phase.first_tokens if is_first else phase.gaps).append(now - before)
                before, is_first = now, False


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.long_prompts", description=__doc__.partition(". ")[0])
    add = parser.add_argument
    add("--rounds", type=positive, default=5, help="of both phases (default: %(default)s)")
    add("--requests", type=positive, default=40, help="of each client in a phase (default: %(default)s)")
    add("--chunk", type=positive, metavar="N", help="chunked_prefill_size (default: the server's)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
