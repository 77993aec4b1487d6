"""Figures of whole servers: the cost of Ray, router and HTTP, and colocated against inline drafters.

Answers over HTTP are compared with the same ones in this process.

Servers are child processes, and requests go over HTTP.
"""

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from benchmarks.eagle import EAGLE3
from benchmarks.figure import CONCURRENCY, Effort, Figure, Section, mt_bench_prompts, prompts_of
from benchmarks.local_server import LocalServer
from benchmarks.results import ROOT
from specray.bench.command import engine_config
from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Outcome, ending_of
from specray.bench.variants import PLAIN
from specray.cli.local_server import free_port
from specray.config import SpeculativeConfig
from specray.errors import SpecRayError
from specray.llm import LLM
from specray.models.tokenizer import render_chat
from specray.sampling_params import SamplingParams

CONFIGS = ROOT / "configs"
SETTLE_S = 3.0  # longer than a server's probe and its copy of the counters take
PHASE_LINE = re.compile(r'^specray_step_seconds_total\{[^}]*phase="(\w+)"[^}]*\} (\S+)', re.MULTILINE)
SPEED_UP = re.compile(r"([0-9.]+) times as fast")
HOST = "host"  # the only phase that is not a rank's
PLACEMENTS = ("inline", "colocated")
SERVED_RATIOS = (("colocated", "inline", 0.95), ("colocated", PLAIN, 2.0), ("inline", PLAIN, 2.0))  # and their goals
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
    """Two running servers that take turns; the other one is idle. The colocated one also answers without drafts.

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
            rates = [
                _rates(urls, group, batch, number)
                for number, group in enumerate(_shown(groups, f"placements, {batch} at a time"))
            ]
            for one, other, goal in SERVED_RATIOS:
                what = f"{one} / {other} drafter, EAGLE-3" if other in PLACEMENTS else f"EAGLE-3, {one} / {other}"
                ratios = [each[one] / each[other] for each in rates]
                is_goal = batch == 1 or other in PLACEMENTS
                title = f"{what}, {batch} at a time over HTTP, output tokens/s, {data}"
                yield Figure.of(title, ratios, goal if is_goal else None)


def over_http(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """One request at a time, streamed over HTTP or in this process, which take turns prompt by prompt."""
    del wanted
    ratios: dict[str, list[float]] = {PLAIN: [], EAGLE3: []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = _changed(Path(folder), "over_http", {"disable_radix_cache": True})
        server = stack.enter_context(LocalServer(config, free_port()))
        server.wait_until_ready()
        eagle3 = stack.enter_context(LLM(engine_config(config, 1)))
        local = {PLAIN: eagle3.with_speculative(SpeculativeConfig()), EAGLE3: eagle3}
        warm_up, *prompts = prompts_of("chat", 1 + effort.num_chat)
        for prompt in (warm_up, *_shown(prompts, "over HTTP and in process")):
            ids = render_chat(eagle3.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            for name, llm in local.items():
                served = asyncio.run(_complete(server.url, ids, effort.max_tokens, name != PLAIN))
                start = time.perf_counter()
                llm.generate([ids], SamplingParams(max_tokens=effort.max_tokens, temperature=0.0, ignore_eos=True))
                if prompt is not warm_up:
                    ratios[name].append((time.perf_counter() - start) / served)
    for name, each in ratios.items():
        yield Figure.of(f"over HTTP / in process, output tokens/s, {name}, one request", each, 0.85)


def demo(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """`make demo`, as often as there are rounds."""
    del wanted
    ratios = []
    for _ in range(effort.rounds):
        command = [sys.executable, "-m", "benchmarks.demo", "--port", str(free_port())]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0 or (found := SPEED_UP.search(ended.stdout)) is None:
            raise SpecRayError(f"the demo ended with {ended.returncode}: {(ended.stderr or ended.stdout)[-500:]}")
        ratios.append(float(found[1]))
    yield Figure.of("make demo, EAGLE-3 / plain", ratios, 1.8)


async def _complete(url: str, prompt: list[int], max_tokens: int, is_drafted: bool) -> float:
    """Seconds of one streamed completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "speculative": {"enabled": is_drafted}}
    target, start = f"{url}/v1/completions", time.perf_counter()
    ending = ending_of(await exchange(target, request_bytes(target, body)))
    if ending.outcome is not Outcome.COMPLETE or ending.num_tokens != max_tokens:
        raise SpecRayError(f"{url}: {ending.num_tokens} tokens and {ending.outcome}: {ending.detail}")
    return time.perf_counter() - start


def _rates(urls: dict[str, str], bodies: Sequence[Any], batch: int, number: int) -> dict[str, float]:
    """Tokens per second of both placements, and of the colocated server without drafts. The order alternates."""
    variants = {name: (url, bodies) for name, url in urls.items()}
    variants[PLAIN] = (urls["colocated"], [body | {"speculative": {"enabled": False}} for body in bodies])
    rates = {}
    for name in variants if number % 2 else reversed(variants):
        num_tokens, seconds = asyncio.run(_answer(*variants[name], batch))
        rates[name] = num_tokens / seconds
    return rates


def _placed(folder: Path, name: str) -> Path:
    """configs/eagle3.yaml with another placement of the drafter."""
    return _changed(folder, name, {"draft": {"placement": name}})


def _changed(folder: Path, name: str, options: dict[str, Any]) -> Path:
    """configs/eagle3.yaml with other options."""
    document = yaml.safe_load((CONFIGS / "eagle3.yaml").read_text(encoding="utf-8"))
    document["applications"][0]["args"] |= options
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


def _shown(groups: Sequence[Any], what: str) -> Iterator[Any]:
    yield from tqdm(groups, what, file=sys.stderr, disable=not sys.stderr.isatty())


SECTIONS = (
    Section(("router",), host_share),
    Section(("placement",), placement),
    Section(("over-http",), over_http),
    Section(("demo",), demo),
)
