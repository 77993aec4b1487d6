"""The parts `serve-…`: whole servers on Ray over a random checkpoint, asked over HTTP, whose processes are killed.

The checkpoint is made on the spot, in the report's folder. The first server finds Triton's cache empty. Drafts are
accepted at a simulated rate, so the texts are meaningless, and another engine cannot continue them.
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import yaml

from benchmarks.gpu.part import Finding
from benchmarks.gpu.random_model import LLAMA_8B, ModelSize, write_head, write_target
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.report import Cell, Order, Report, requests
from benchmarks.gpu.speed import VARIANTS, Variant
from benchmarks.local_server import LocalServer
from cluster.engine.mps import ANOTHER, IN_USE
from specray.bench.exchange import Exchange, exchange, request_bytes
from specray.bench.ledger import Outcome, ending_of
from specray.cli.local_server import free_port

READY_S = 280.0
BACK_S = 150.0  # for what was killed to run again
POLL_S = 0.1
TABLE = "Servers on Ray, 8B model with random weights, over HTTP"
HEADERS = ["server", "what", "measured", "goal"]
PLACEMENT_GOAL = 0.95  # tokens/s, colocated / inline
# The options of `draft`, by the middle word of a part's name.
DRAFTS = {
    "inline": {"placement": "inline"},
    "colocated": {"placement": "colocated"},
    "memory": {"placement": "colocated", "cuda_ipc": True},
}


class Setting(NamedTuple):
    size: ModelSize
    variants: dict[str, Variant]  # by the last word of a part's name
    batch_sizes: tuple[int, ...]
    prompt: int  # tokens
    max_tokens: int
    killed_tokens: int  # of the streams during which a process is killed,
    settled_s: float  # so long after they began


FULL = Setting(
    LLAMA_8B, {"plain": VARIANTS[0], "chain": VARIANTS[3], "tree": VARIANTS[5]}, (1, 8, 64), 128, 256, 1500, 1.0
)
TINY = FULL._replace(size=TINY_MODEL, batch_sizes=(1, 2), prompt=8, max_tokens=12, killed_tokens=200, settled_s=0.15)


class Load(NamedTuple):
    """Streams that began together."""

    tokens_per_s: float
    longest_gap_s: float  # between two pieces of a reply
    num_complete: int


def report(order: Order) -> Report:
    setting, found = TINY if order.is_tiny else FULL, list[Cell]()
    for cell in order.time_limit.in_time(measure(order, setting)):
        found.append(cell)
        print(", ".join(_row(cell)), flush=True)  # minutes pass before the table
    return Report(HEADERS, [_row(cell) for cell in found], 2, f"prompts of {setting.prompt} tokens", found)


def measure(order: Order, setting: Setting) -> Iterator[Cell]:
    _, *placement, kind = order.part.split("-")
    variant = setting.variants[kind]
    title, is_colocated = ", ".join([variant.title, *placement]), placement not in ([], ["inline"])
    cache = order.folder / "triton"
    if not variant.chain:
        shutil.rmtree(cache, ignore_errors=True)
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    with tempfile.TemporaryDirectory() as folder:
        config = _config(order, setting, variant, *placement)
        file = Path(folder, "serve.yaml")
        file.write_text(yaml.safe_dump(config))
        with LocalServer(file, free_port()) as server:
            ready = "until ready, s" if variant.chain else "until ready with a cold Triton cache, s"
            yield Cell(TABLE, title, ready, server.wait_until_ready(READY_S), "{:.1f}")
            if "memory" in placement and not order.is_tiny:
                _check_mps(json.loads(server.get("/server_info"))["draft_mps"])
            for count in setting.batch_sizes:
                load = asyncio.run(_streams(server.url, setting, count, setting.max_tokens))
                if load.num_complete < count:
                    raise RuntimeError(f"{load} of {count}; the server's log ends with:\n{server.log_tail()}")
                goal = variant.goal if count == 1 and not is_colocated else None
                yield Cell(TABLE, title, f"tokens/s, {requests(count)}", load.tokens_per_s, "{:,.0f}", goal)
                yield Cell(TABLE, title, f"longest stall, s, {requests(count)}", load.longest_gap_s)
                if is_colocated:
                    yield from _beside_inline(order, title, count, load.tokens_per_s)
            for victim in ("DraftActor", "TargetActor") if is_colocated else ("TargetActor",):
                yield from _kill(server, setting, title, victim)


def _config(order: Order, setting: Setting, variant: Variant, placement: str = "inline") -> dict[str, Any]:
    dtype = torch.float32 if order.is_tiny else torch.bfloat16
    folder, size = order.folder / f"checkpoint-{setting.size.name.replace(' ', '-')}", setting.size
    if not (folder / "head" / "model.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_target(folder, size, dtype, order.device)
        write_head(folder / "head", size, dtype, order.device)
    speculative: dict[str, Any] = {}
    if variant.chain:
        speculative = {
            "algorithm": "EAGLE3",
            "draft_model_path": str(folder / "head"),
            "num_steps": variant.chain,
            "eagle_topk": variant.topk,
            "num_draft_tokens": variant.num_nodes,
            "simulate_accept_length": variant.accept_length,
            "simulate_output_is_meaningless": True,
        }
    args = {
        "model": str(folder),
        "device": order.device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "max_running_requests": max(setting.batch_sizes),
        "speculative": speculative,
        "draft": DRAFTS[placement],
        "server": {"request_timeout_s": 600.0},
    }
    if order.is_tiny:
        args |= {"max_total_tokens": 4096, "num_threads": 1}
    app = {"name": "specray", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1"}, "applications": [app]}


async def _streams(url: str, setting: Setting, count: int, max_tokens: int) -> Load:
    start = time.perf_counter()
    replies = await asyncio.gather(*(_stream(url, setting, row, max_tokens) for row in range(count)))
    seconds = time.perf_counter() - start
    endings = [ending_of(reply) for reply in replies]
    num_complete = sum(ending.outcome is Outcome.COMPLETE for ending in endings)
    num_tokens = sum(ending.num_tokens for ending in endings)
    return Load(num_tokens / seconds, max(reply.longest_gap for reply in replies), num_complete)


async def _stream(url: str, setting: Setting, row: int, max_tokens: int) -> Exchange:
    salt = time.monotonic_ns()  # so that no prompt is in the prefix cache
    body = {
        "prompt": [(salt + 7 * row + place) % setting.size.vocab for place in range(setting.prompt)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    target = f"{url}/v1/completions"
    return await exchange(target, request_bytes(target, body), timeout_s=READY_S)


def _beside_inline(order: Order, title: str, count: int, tokens_per_s: float) -> Iterator[Cell]:
    """The ratio to the inline server, if that was measured."""
    _, placement, _ = order.part.split("-")
    inline = Finding.read(order.folder / f"{order.part.replace(placement, 'inline')}.json")
    for cell in inline.report.cells if inline is not None else ():
        if cell.column == f"tokens/s, {requests(count)}":
            ratio = tokens_per_s / cell.value
            yield Cell(TABLE, title, f"tokens/s over inline, {requests(count)}", ratio, goal=PLACEMENT_GOAL)


def _check_mps(mps: str) -> None:
    """Without MPS, trees cross the socket."""
    if mps not in (IN_USE, ANOTHER):
        raise RuntimeError(f"draft.cuda_ipc has no effect: MPS is {mps}; start the container with MPS's programs")


def _kill(server: LocalServer, setting: Setting, title: str, victim: str) -> Iterator[Cell]:
    """Kill the server's actor `victim` while streams run."""

    async def killed() -> tuple[Load, float]:
        streams = asyncio.ensure_future(_streams(server.url, setting, setting.batch_sizes[0], setting.killed_tokens))
        await asyncio.sleep(setting.settled_s)
        pids = _pids(victim)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        start = time.perf_counter()
        while not (_is_whole(server) and set(_pids(victim)) - set(pids)):
            if time.perf_counter() - start > BACK_S:
                raise RuntimeError(f"no {victim} is back; the server's log ends with:\n{server.log_tail()}")
            await asyncio.sleep(POLL_S)
        seconds = time.perf_counter() - start
        return await streams, seconds

    load, seconds = asyncio.run(killed())
    yield Cell(TABLE, title, f"kill -9 of {victim}: until whole again, s", seconds, "{:.1f}")
    yield Cell(TABLE, title, f"kill -9 of {victim}: longest stall, s", load.longest_gap_s)
    yield Cell(TABLE, title, f"kill -9 of {victim}: complete streams", load.num_complete, "{:.0f}")


def _pids(actor: str) -> list[int]:
    """Processes of this program's servers that run a Ray actor of this class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith(f"ray::{actor}"):
                found.append(process.pid)
    return found


def _is_whole(server: LocalServer) -> bool:
    """Whether its engine answers and has its drafter."""
    try:
        return "absent_drafters" not in json.loads(server.get("/health"))
    except (OSError, ValueError):
        return False


def _row(cell: Cell) -> list[str]:
    goal = "" if cell.goal is None else f">= {cell.form.format(cell.goal)}"
    return [cell.row, cell.column, cell.form.format(cell.value), goal]
