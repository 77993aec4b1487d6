"""Figures of whole servers: the cost of Ray, router and HTTP, and colocated against inline drafters.

Servers are child processes, and requests go over HTTP.
"""

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from tqdm import tqdm

from benchmarks.figure import CONCURRENCY, ROOT, Effort, Figure, Section, mt_bench_prompts, prompts_of
from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Outcome, ending_of
from specray.cli.local_server import LocalServer, free_port
from specray.errors import SpecRayError

CONFIGS = ROOT / "configs"
SETTLE_S = 3.0  # longer than a server's probe and its copy of the counters take
PHASE_LINE = re.compile(r'^specray_step_seconds_total\{[^}]*phase="(\w+)"[^}]*\} (\S+)', re.MULTILINE)
HOST = "host"  # the only phase that is not a rank's
PLACEMENTS = ("inline", "colocated")
BATCHES = (1, CONCURRENCY)


def host_share(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Host share of the steps' time and of all time; the latter includes the time between steps."""
    del wanted
    with LocalServer(CONFIGS / "plain.yaml", free_port()) as server:
        server.wait_until_ready()
        bodies = [_body(prompt.turns[0], effort.max_tokens) for prompt in prompts_of("chat", 1 + effort.num_chat)]
        asyncio.run(_answer(server.url, bodies[:1], 1))  # warms up
        for batch in BATCHES:
            before = _phases(server)
            repeated = [bodies[1 + number % effort.num_chat] for number in range(batch * effort.num_chat)]
            _, seconds = asyncio.run(_answer(server.url, repeated, batch))
            spent = {phase: value - before[phase] for phase, value in _phases(server).items()}
            ranks = sum(spent.values()) - spent[HOST]
            if batch == 1:
                share = spent[HOST] / sum(spent.values())
                yield Figure("host share of a step, through the router (mean)", share, 0.15, "{:.1%}", at_most=True)
            what = f"share of all time in which no rank computes, plain, {batch} at a time over HTTP"
            yield Figure(what, 1 - ranks / seconds, 0.10, "{:.1%}", at_most=True)


def placement(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Two running servers that take turns; the other one is idle.

    Turns are short, one for each prompt, because other load on the machine varies within seconds.
    """
    del wanted
    prompts, data = mt_bench_prompts(effort)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        urls = {}
        for name in PLACEMENTS:
            server = stack.enter_context(LocalServer(_placed(Path(folder), name), free_port()))
            server.wait_until_ready()
            urls[name] = server.url
        bodies = [_body(prompt.turns[0], effort.max_tokens) for prompt in prompts]
        for batch in BATCHES:
            groups = [[bodies[(first + i) % len(bodies)] for i in range(batch)] for first in range(len(bodies))]
            ratios = [_ratio(urls, group, batch, number) for number, group in enumerate(_shown(groups, batch))]
            what = f"colocated / inline drafter, EAGLE-3, {batch} at a time over HTTP, output tokens/s, {data}"
            yield Figure(what, median(ratios), 0.95)


def _ratio(urls: dict[str, str], bodies: Sequence[Any], batch: int, number: int) -> float:
    """Colocated / inline. The order alternates between groups."""
    rates = {}
    for name in PLACEMENTS if number % 2 else reversed(PLACEMENTS):
        num_tokens, seconds = asyncio.run(_answer(urls[name], bodies, batch))
        rates[name] = num_tokens / seconds
    inline, colocated = (rates[name] for name in PLACEMENTS)
    return colocated / inline


def _placed(folder: Path, name: str) -> Path:
    """configs/eagle3.yaml with another placement of the drafter."""
    document = yaml.safe_load((CONFIGS / "eagle3.yaml").read_text(encoding="utf-8"))
    args = document["applications"][0]["args"]
    args["draft"] = args.get("draft", {}) | {"placement": name}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _body(text: str, max_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _answer(url: str, bodies: Sequence[Any], batch: int) -> tuple[int, float]:
    """(tokens, seconds) of all answers, `batch` at a time. SpecRayError if one is incomplete."""
    waiting = iter(bodies)
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        for body in waiting:
            target = f"{url}/v1/chat/completions"
            ending = ending_of(await exchange(target, request_bytes(target, body)))
            if ending.outcome is not Outcome.COMPLETE:
                raise SpecRayError(f"{url}: a request ended as {ending.outcome}: {ending.detail}")
            num_tokens += ending.num_tokens

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(batch)))
    return num_tokens, time.perf_counter() - start


def _phases(server: LocalServer) -> dict[str, float]:
    time.sleep(SETTLE_S)
    return {phase: float(seconds) for phase, seconds in PHASE_LINE.findall(server.get("/metrics"))}


def _shown(groups: Sequence[Any], batch: int) -> Iterator[Any]:
    yield from tqdm(groups, f"placements, {batch} at a time", file=sys.stderr, disable=not sys.stderr.isatty())


SECTIONS = (Section(("router",), host_share), Section(("placement",), placement))
