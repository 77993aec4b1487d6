"""`python -m benchmarks.long_prompts`: what prompts of 8,000 tokens cost short requests.

Four clients stream short answers of a toy model from Ray Serve, first alone and then beside the long prompts. There is
one every two seconds, or every second time that one takes alone if that is longer, as on few cores: an engine that is
offered more than it computes would only show its queue. The interval is printed.

A round has both phases, in an order that alternates. Printed are the medians over the rounds of the 99th percentiles of
the time to the first token and of the gaps between tokens, and of their ratios in one round. Exit status 2 if the
server does not keep up.
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
from typing import NamedTuple

import httpx

from benchmarks.small_server import small_server
from specray.bench import machine
from specray.cli.arguments import positive
from specray.tables import format_table
from tests.support.toy import VOCAB_SIZE, write_toy

NUM_CLIENTS, MAX_TOKENS = 4, 24
LONG_PROMPT, EVERY_S = 8000, 2.0
FIRST_TOKEN_ID = 3  # after the special ones
MAX_SHARE = 0.5  # of the time of an idle server that long prompts may take
MAX_UNFINISHED = 4  # long prompts
MIN_LONG_PROMPTS = 3  # in a phase
TIMEOUT_S = 120.0
CONTEXT = 8448
GOAL = 2.0


class OverloadError(Exception):
    """The server does not keep up with what it is offered."""


class Phase(NamedTuple):
    """Seconds of all requests of a phase."""

    first_tokens: list[float]
    gaps: list[float]

    def p99s(self) -> tuple[float, float]:
        return _p99(self.first_tokens), _p99(self.gaps)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rounds, failure = [], ""
    with tempfile.TemporaryDirectory(prefix="specray-long-") as folder, _server(Path(folder), options.chunk) as port:
        try:
            rounds = asyncio.run(_measure(f"http://127.0.0.1:{port}", options.rounds, options.seconds, options.every))
        except* (OverloadError, httpx.HTTPError) as errors:
            failure = _first(errors)
    if failure:
        print(f"long_prompts: {failure}", file=sys.stderr)
        return 2
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


def _first(errors: BaseExceptionGroup[Exception]) -> str:
    """The first error of a group, in words."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {TIMEOUT_S:g} s; run it on an idle machine, or raise --every"
    return str(error) or type(error).__name__


@contextmanager
def _server(folder: Path, chunk: int | None) -> Iterator[int]:
    """The port of a server of a small model whose positions go far enough."""
    model = write_toy(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    sizes = {"max_total_tokens": 4 * CONTEXT, "max_running_requests": NUM_CLIENTS + MAX_UNFINISHED}
    chunks = {} if chunk is None else {"chunked_prefill_size": chunk}
    with small_server(folder, model, **sizes, **chunks) as port:
        yield port


async def _measure(url: str, num_rounds: int, seconds: float, every_s: float | None) -> list[tuple[Phase, Phase]]:
    """(alone, beside) of each round."""
    rounds = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await _ask(client, 2.0, Phase([], []))  # warm
        alone_s = min([await _send(client, random.Random(-number)) for number in (1, 2)])
        every_s = every_s or max(EVERY_S, alone_s / MAX_SHARE)
        seconds = max(seconds, MIN_LONG_PROMPTS * every_s)
        print(
            f"a prompt of {LONG_PROMPT} tokens takes {alone_s:.1f} s alone; one every {every_s:.1f} s, "
            f"phases of {seconds:.0f} s",
            flush=True,
        )
        for number in range(num_rounds):
            alone, beside = Phase([], []), Phase([], [])
            if number % 2 == 0:
                await _ask(client, seconds, alone)
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(_send_long_prompts(client, random.Random(number), every_s))
                await _ask(client, seconds, beside)
                sending.cancel()
            if number % 2:
                await _ask(client, seconds, alone)
            rounds.append((alone, beside))
    return rounds


async def _send_long_prompts(client: httpx.AsyncClient, rng: random.Random, every_s: float) -> None:
    """One every `every_s`, whether the one before it has ended or not. OverloadError if too many have not."""
    unfinished: set[asyncio.Task[float]] = set()
    async with asyncio.TaskGroup() as tasks:
        while True:
            if len(unfinished) == MAX_UNFINISHED:
                raise OverloadError(
                    f"{MAX_UNFINISHED} long prompts are unfinished, so this server does not compute one every "
                    f"{every_s:.1f} s beside short requests; run it on an idle machine, or raise --every"
                )
            task = tasks.create_task(_send(client, rng))
            unfinished.add(task)
            task.add_done_callback(unfinished.discard)
            await asyncio.sleep(every_s)


async def _send(client: httpx.AsyncClient, rng: random.Random) -> float:
    """Send a long prompt that is new to the prefix cache; the seconds until its token."""
    prompt = [rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(LONG_PROMPT)]
    start = time.perf_counter()
    reply = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    _check(reply)
    return time.perf_counter() - start


def _check(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        raise OverloadError(f"a request got status {reply.status_code}: {reply.text}")


async def _ask(client: httpx.AsyncClient, seconds: float, phase: Phase) -> None:
    """Send requests in a row from each client for `seconds`."""
    until = time.perf_counter() + seconds

    async def one_client(number: int) -> None:
        request = 0
        while time.perf_counter() < until:
            await _stream(client, f"Once upon a time {number} {request}", phase)
            request += 1

    await asyncio.gather(*(one_client(number) for number in range(NUM_CLIENTS)))


async def _stream(client: httpx.AsyncClient, prompt: str, phase: Phase) -> None:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": 1, "ignore_eos": True, "stream": True}
    before, is_first = time.perf_counter(), True
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
        _check(reply)
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
    add("--seconds", type=float, default=20.0, help="of each phase, at least (default: %(default)s)")
    add("--every", type=float, metavar="S", help="seconds from a long prompt to the next (default: see above)")
    add("--chunk", type=positive, metavar="N", help="chunked_prefill_size (default: the server's)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
