"""Open-loop load: requests arrive at given times, whether or not the server has finished earlier ones."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from tqdm import tqdm

from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Ending, Ledger, Outcome, ending_of

GAUGES = ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc")
REPLY_OVERHEAD = 600  # estimate of the bytes of a reply that do not depend on its length; a cut may be past its end
BYTES_PER_TOKEN = 250  # estimate, in a stream


@dataclass(frozen=True, slots=True)
class Load:
    """The load to send."""

    url: str  # the server's, without a path
    rate: float  # requests a second, on average
    seconds: float
    max_tokens: int = 32
    prompts: Sequence[Sequence[str]] = (("Once upon a time",),)  # the turns of each conversation, used in this order
    stream: bool = True
    timeout_s: float = 60.0  # the server's time limit for each; the client waits twice as long
    cut_share: float = 0.0  # share of requests that disconnect at a random byte
    slow_share: float = 0.0  # share of requests that read one byte a second
    key: str | None = None
    seed: int = 0
    is_chat: bool = False  # whether /v1/chat/completions is asked instead of /v1/completions
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0, "ignore_eos": True})  # body fields


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a load."""

    ledger: Ledger
    seconds: float  # time until the last request had ended
    was_interrupted: bool = False

    @property
    def goodput(self) -> float:
        """Tokens a second of complete replies."""
        return sum(ending.num_tokens for ending in self.ledger.of(Outcome.COMPLETE)) / self.seconds

    def refusal_s(self, quantile: float) -> float:
        """Seconds until a request was refused, at a quantile; inf if none was."""
        return at_quantile([ending.seconds for ending in self.ledger.of(Outcome.REFUSED)], quantile)

    def latencies(self) -> dict[str, list[float]]:
        """Seconds by what they measure, of complete requests; without those that no request has."""
        complete = self.ledger.of(Outcome.COMPLETE)
        streams = [ending for ending in complete if ending.token_times]
        found = {
            "first token": [ending.token_times[0] for ending in streams],
            "between tokens": [between for ending in streams if (between := _between_tokens(ending)) is not None],
            "between chunks": [b - a for ending in streams for a, b in pairwise(ending.token_times)],
            "whole request": [ending.seconds for ending in complete],
        }
        return {name: times for name, times in found.items() if times}


def at_quantile(times: Sequence[float], quantile: float) -> float:
    """inf without times."""
    return sorted(times)[min(len(times) - 1, int(quantile * len(times)))] if times else inf


def _between_tokens(ending: Ending) -> float | None:
    """Mean seconds between the tokens after the first chunk; None if there are none."""
    first, last = ending.token_times[0], ending.token_times[-1]
    return (last - first) / (ending.num_tokens - 1) if last > first and ending.num_tokens > 1 else None


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """When requests arrive, in seconds from the start: a Poisson process."""
    gaps = (rng.expovariate(rate) for _ in range(int(2 * rate * seconds) + 100))
    return [at for at in accumulate(gaps) if at < seconds]


async def run(load: Load, progress: bool = False) -> Report:
    """Send every request at its time, and wait until all have ended. A cancellation disconnects the open ones."""
    rng, ledger = random.Random(load.seed), Ledger()
    times = arrivals(load.rate, load.seconds, rng)
    start, was_interrupted = time.perf_counter(), False
    with tqdm(total=len(times), desc="load", unit="conversation", disable=None if progress else True) as bar:
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, at in enumerate(times):
                    await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                    tasks.create_task(_converse(load, index, rng, ledger, start)).add_done_callback(
                        lambda _: _show(bar, ledger)
                    )
        except asyncio.CancelledError:
            was_interrupted = True
    return Report(ledger, time.perf_counter() - start, was_interrupted)


def _show(bar: "tqdm[Any]", ledger: Ledger) -> None:
    bar.set_postfix({str(outcome): count for outcome in Outcome if (count := ledger.count(outcome))}, refresh=False)
    bar.update()


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


async def _converse(load: Load, index: int, rng: random.Random, ledger: Ledger, start: float) -> None:
    """The turns of one conversation, each after the answer to the one before, as long as the answers are complete."""
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(load.prompts[index % len(load.prompts)]):
        messages.append({"role": "user", "content": turn})
        asked = {"messages": messages} if load.is_chat else {"prompt": turn}
        ending = await _one(load, f"{load.seed}-{index}-{number}", _body(load, index) | asked, rng, ledger, start)
        if ending.outcome is not Outcome.COMPLETE:
            return
        messages.append({"role": "assistant", "content": ending.text})


async def _one(
    load: Load, request_id: str, body: dict[str, Any], rng: random.Random, ledger: Ledger, start: float
) -> Ending:
    url = f"{load.url}/v1/{'chat/' if load.is_chat else ''}completions"
    request = request_bytes(url, body, load.key)
    cut_at = rng.randrange(_longest(load, request)) if rng.random() < load.cut_share else None
    pace = 1.0 if rng.random() < load.slow_share else None
    ledger.begin(request_id)
    sent = time.perf_counter()
    ending = Ending(Outcome.ABORTED, None, 0.0)
    try:
        ending = ending_of(await exchange(url, request, 2 * load.timeout_s, cut_at, pace))
    finally:  # also of a request that is cancelled
        ending = replace(ending, sent_s=sent - start)
        ledger.end(request_id, ending)
    return ending


def _body(load: Load, index: int) -> dict[str, Any]:
    body = {"max_tokens": load.max_tokens, "seed": index, "timeout": load.timeout_s, **load.options}
    return body | {"stream": True, "stream_options": {"include_usage": True}} if load.stream else body


def _longest(load: Load, request: bytes) -> int:
    """An estimate of the bytes of a whole exchange, rounded up."""
    return len(request) + REPLY_OVERHEAD + (BYTES_PER_TOKEN * load.max_tokens if load.stream else 0)
