"""Open-loop load: requests arrive at given times, whether or not the server has finished earlier ones."""

import asyncio
import random
import time
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Ledger, Outcome, ending_of

GAUGES = ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc")
REPLY_OVERHEAD = 600  # estimate of the bytes of a reply that do not depend on its length; a cut may be past its end
BYTES_PER_TOKEN = 250  # estimate, in a stream


@dataclass(frozen=True, slots=True)
class Load:
    """The load to send."""

    url: str  # of the server, without a path
    rate: float  # requests a second, on average
    seconds: float
    max_tokens: int = 32
    prompt: str = "Once upon a time"
    stream: bool = True
    timeout_s: float = 60.0  # the server's time limit for each; the client waits twice as long
    cut_share: float = 0.0  # share of requests that disconnect at a random byte
    slow_share: float = 0.0  # share of requests that read one byte a second
    key: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a load."""

    ledger: Ledger
    seconds: float  # until the last request had ended

    @property
    def goodput(self) -> float:
        """Tokens a second of complete replies."""
        return sum(ending.num_tokens for ending in self.ledger.of(Outcome.COMPLETE)) / self.seconds

    def refusal_s(self, quantile: float) -> float:
        """Seconds until a request was refused, at a quantile; inf if none was."""
        times = sorted(ending.seconds for ending in self.ledger.of(Outcome.REFUSED))
        return times[min(len(times) - 1, int(quantile * len(times)))] if times else inf


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """When requests arrive, in seconds from the start: a Poisson process."""
    gaps = (rng.expovariate(rate) for _ in range(int(2 * rate * seconds) + 100))
    return [at for at in accumulate(gaps) if at < seconds]


async def run(load: Load) -> Report:
    """Send every request at its time, and wait until all have ended."""
    rng, ledger = random.Random(load.seed), Ledger()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, at in enumerate(arrivals(load.rate, load.seconds, rng)):
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.create_task(_one(load, index, rng, ledger))
    return Report(ledger, time.perf_counter() - start)


async def idle_after(url: str, key: str | None = None, patience_s: float = 30.0) -> float:
    """Seconds until no request runs, waits or holds KV blocks; inf if that takes longer than `patience_s`."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience_s:
        reply = await exchange(f"{url}/metrics", request_bytes(f"{url}/metrics", key=key), patience_s)
        lines = [line.split(" ") for line in reply.body.decode().splitlines() if line.startswith(GAUGES)]
        if lines and not any(float(value) for _, value in lines):
            return time.perf_counter() - start
        await asyncio.sleep(0.05)
    return inf


async def _one(load: Load, index: int, rng: random.Random, ledger: Ledger) -> None:
    request_id = f"{load.seed}-{index}"
    url = f"{load.url}/v1/completions"
    request = request_bytes(url, _body(load, index), load.key)
    cut_at = rng.randrange(_longest(load, request)) if rng.random() < load.cut_share else None
    pace = 1.0 if rng.random() < load.slow_share else None
    ledger.begin(request_id)
    ledger.end(request_id, ending_of(await exchange(url, request, 2 * load.timeout_s, cut_at, pace)))


def _body(load: Load, index: int) -> dict[str, Any]:
    body = {
        "prompt": load.prompt,
        "max_tokens": load.max_tokens,
        "seed": index,
        "temperature": 1.0,
        "ignore_eos": True,
        "timeout": load.timeout_s,
    }
    return body | {"stream": True, "stream_options": {"include_usage": True}} if load.stream else body


def _longest(load: Load, request: bytes) -> int:
    """An estimate of the bytes of a whole exchange, rounded up."""
    return len(request) + REPLY_OVERHEAD + (BYTES_PER_TOKEN * load.max_tokens if load.stream else 0)
