"""The part `served`: whole engine steps as they are served, of random weights.

The engine, its scheduler and detokenizer are in this process. The rank is too, or it is in a process of its own behind
the channel that the router of a cluster has, with its drafter inside or in a third process. Ray only starts such
processes, so it is not needed. Drafts are accepted at a simulated rate.
"""

import contextlib
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch

from benchmarks.gpu.random_model import LLAMA_8B, ModelSize, make_target, write_head
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.rank_process import EPOCH, LOADING_S
from benchmarks.gpu.report import Cell, Order, Report, requests
from benchmarks.gpu.speed import VARIANTS, WARM_UP, Setting, Variant, config_of
from specray.channel import Channel
from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity, Executor
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import SamplingParams
from specray.step import StepPlan, StepResult
from specray.step_wire import pack, unpack_result
from specray.worker.served_loop import MAX_STARTED
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up

PLACES = ("in this process", "channel", "channel, colocated drafter")


FULL = Setting(LLAMA_8B, [VARIANTS[0], VARIANTS[3]], (1, 64), 100, 128)
TINY = Setting(TINY_MODEL, VARIANTS[:2], (2,), 3, 8)


class Served(NamedTuple):
    """One measurement."""

    variant: Variant
    place: str  # of the rank
    batch_size: int
    tokens_per_s: float
    step_ms: float

    @property
    def goal(self) -> float | None:
        """Tokens/s of one request."""
        return self.variant.goal if self.batch_size == 1 and self.place != PLACES[2] else None


class RankProcess:
    """An Executor over a rank in another process, and its drafter in a third one if it is not the rank's own."""

    def __init__(self, size: ModelSize, config: EngineConfig, has_draft_process: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file, address, drafts = (Path(self._folder.name, name) for name in ("engine.json", "steps", "drafts"))
        file.write_text(config.model_dump_json())
        self._processes: list[subprocess.Popen[str]] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
                server.bind(str(address))
                server.listen(1)
                server.settimeout(LOADING_S)
                where = str(drafts) if has_draft_process else ""
                num_slots = self._start("rank_process", size.name, str(file), str(address), where)
                if has_draft_process:
                    self._start("draft_process", str(file), num_slots, str(drafts), str(EPOCH))
                self._channel = Channel(server.accept()[0], EPOCH)
            self.capacity = Capacity(**msgpack.unpackb(self._channel.recv(LOADING_S)))
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        self._channel.send(pack(plan))

    def collect(self) -> StepResult:
        return unpack_result(self._channel.recv())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start(self, module: str, *arguments: str) -> str:
        """Start a process; the first line that it prints."""
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
        process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{module} ended with status {process.wait()}; its error is above")
        return line


def report(order: Order) -> Report:
    setting = TINY if order.is_tiny else FULL
    found = []
    for each in order.time_limit.in_time(measure(setting, order.device)):
        found.append(each)
        print(", ".join(table_rows([each])[0]), flush=True)  # minutes pass before the table
    table = "Engine steps of an 8B model with random weights, as they are served, tokens a second"
    cells = [
        Cell(
            table,
            f"{each.variant.title}, {requests(each.batch_size)}",
            each.place,
            each.tokens_per_s,
            "{:,.0f}",
            each.goal,
        )
        for each in found
    ]
    return Report(HEADERS, table_rows(found), 2, "goals are for an H200", cells)


def measure(setting: Setting, device: torch.device) -> Iterator[Served]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        embedding = make_target(folder, setting.size, dtype, device).embedding.weight
        head = write_head(folder / "head", setting.size, dtype, device, embedding)
        del embedding
        for variant in setting.variants:
            sizes = max(setting.batch_sizes), setting.prompt, setting.num_steps
            config = config_of(folder, head, device, variant, True, *sizes)
            for place in PLACES if variant.chain else PLACES[:2]:
                with contextlib.closing(_executor(place, setting.size, config)) as executor:
                    engine = Engine(config, executor, load_tokenizer(folder).backend_tokenizer)
                    for batch_size in setting.batch_sizes:
                        yield _measure(engine, setting, variant, place, batch_size)
                del engine, executor  # the next one needs their memory


def _executor(place: str, size: ModelSize, config: EngineConfig) -> Executor:
    device, folder = torch.device(config.device), Path(config.model)
    gc.collect()  # the memory of the one before
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if place != PLACES[0]:
        return RankProcess(size, config, place == PLACES[2])
    model = make_target(folder, size, getattr(torch, config.dtype), device)
    worker = start_worker(config, model=model)
    warm_up(worker, config)
    worker.capacity = worker.capacity._replace(max_plans=MAX_STARTED)
    return StepLoop(worker)


def _measure(engine: Engine, setting: Setting, variant: Variant, place: str, batch_size: int) -> Served:
    length = (setting.num_steps + WARM_UP) * (variant.chain + 1)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, seed=0)
    names = [f"{place} {batch_size} {row}" for row in range(batch_size)]
    for row, name in enumerate(names):
        tokens = [(7 * row + column) % setting.size.vocab for column in range(setting.prompt)]
        engine.add_request(EngineRequest(name, tokens, params))
    for _ in range(WARM_UP):
        engine.step()
    num_tokens, start = 0, time.perf_counter()
    for _ in range(setting.num_steps):
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - start
    engine.requests.abort(names)
    while engine.has_work:
        engine.step()
    return Served(variant, place, batch_size, num_tokens / seconds, 1e3 * seconds / setting.num_steps)


HEADERS = ["variant", "rank", "requests", "tokens/s", "step, ms", "goal"]


def table_rows(found: list[Served]) -> list[list[str]]:
    return [
        [
            each.variant.title,
            each.place,
            str(each.batch_size),
            f"{each.tokens_per_s:.0f}",
            f"{each.step_ms:.2f}",
            "" if each.goal is None else f">= {each.goal:.0f}",
        ]
        for each in found
    ]
