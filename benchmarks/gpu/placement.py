"""The part `placement`: decode steps with the drafter in the rank's process and in one of its own.

`colocated` is a process on the rank's GPU, which the two share by turns unless an MPS daemon runs; `separate` is one on
the next GPU. Hidden states cross through page-locked memory of the host and trees through a socket; with a daemon that
CUDA_MPS_PIPE_DIRECTORY names, once more both through the GPU's memory (CUDA IPC).
Drafts are accepted at a simulated rate, so tokens a step below that rate show drafts that came too late. Where limits
allow half of a chain, a step does not pay for the other half.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.random_model import LLAMA_8B, make_target, write_head
from benchmarks.gpu.random_model import TINY as TINY_MODEL
from benchmarks.gpu.report import Cell, Order, Report, requests
from benchmarks.gpu.speed import VARIANTS, Setting, Speed, Steps, config_of
from specray.config import EngineConfig
from specray.step import UNLIMITED, DraftLimit
from specray.worker.remote_drafter.handshake import DraftEndpoint, DraftPlacement
from specray.worker.startup import start_worker

EPOCH = 1


FULL = Setting(LLAMA_8B, [VARIANTS[3]], (1, 8), 100, 128)
TINY = Setting(TINY_MODEL, [VARIANTS[1]], (2,), 5, 8)


class Placed(NamedTuple):
    placement: DraftPlacement
    uses_cuda_ipc: bool
    batch_size: int
    tokens_per_s: float | None  # None: this machine has no second GPU
    step_ms: float | None
    tokens_per_step: float | None
    goal: float | None = None
    limit: DraftLimit = UNLIMITED

    @property
    def title(self) -> str:
        title = f"{self.placement}, draft.cuda_ipc" if self.uses_cuda_ipc else self.placement
        return title if self.limit == UNLIMITED else f"{title}, up to {self.limit.num_tokens} drafted"


def report(order: Order) -> Report:
    setting = TINY if order.is_tiny else FULL
    [variant] = setting.variants
    with tempfile.TemporaryDirectory() as folder:
        found = list(order.time_limit.in_time(measure(Path(folder), setting, order.device)))
    table = f"Placement of the drafter, {variant.title}, tokens a second"
    cells = [
        Cell(table, each.title, requests(each.batch_size), each.tokens_per_s, "{:,.0f}")
        for each in found
        if each.tokens_per_s is not None
    ]
    return Report(HEADERS, table_rows(found), 1, variant.title, cells)


def measure(folder: Path, setting: Setting, device: torch.device) -> Iterator[Placed]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, [variant], most = setting.size, setting.variants, max(setting.batch_sizes)
    model = make_target(folder, size, dtype, device)
    head = write_head(folder / "head", size, dtype, device, model.embedding.weight)
    config = config_of(folder, head, device, variant, True, most, setting.prompt, setting.num_steps)
    placements: list[tuple[DraftPlacement, bool]] = [("inline", False), ("colocated", False), ("separate", False)]
    if device.type == "cuda" and os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        placements.insert(2, ("colocated", True))
    for number, (placement, uses_cuda_ipc) in enumerate(placements):
        if placement == "separate" and torch.cuda.device_count() < 2:
            yield from (Placed(placement, False, batch_size, None, None, None) for batch_size in setting.batch_sizes)
            continue
        endpoint = DraftEndpoint(str(folder / f"{placement}-{number}"), EPOCH, placement, uses_cuda_ipc)
        worker = start_worker(config, model=model, colocate=None if placement == "inline" else endpoint)
        process = None
        if placement != "inline":
            num_slots = worker.capacity.num_blocks * config.page_size
            process = _start(folder, config, num_slots, endpoint)
        try:
            steps = Steps(worker, size, setting.prompt)
            half = variant.chain // 2
            for each in (variant, variant._replace(limit=DraftLimit(half, half), goal=None)):
                for batch_size in setting.batch_sizes:
                    yield _placed(endpoint, steps.measure(each, True, batch_size, setting.num_steps))
        finally:
            if process is not None:
                process.kill()
                process.wait()


def _placed(endpoint: DraftEndpoint, speed: Speed) -> Placed:
    goal = speed.variant.goal if speed.batch_size == 1 else None
    seen = speed.tokens_per_s, speed.step_ms, speed.tokens_per_step
    return Placed(endpoint.placement, endpoint.uses_cuda_ipc, speed.batch_size, *seen, goal, speed.variant.limit)


def _start(folder: Path, config: EngineConfig, num_slots: int, endpoint: DraftEndpoint) -> "subprocess.Popen[str]":
    """The drafter's process, once it is connected."""
    file = folder / "config-of-drafter.json"
    file.write_text(config.model_dump_json())
    environment = dict(os.environ)
    if endpoint.placement == "separate":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = seen[1]
    command = [sys.executable, "-m", "benchmarks.gpu.draft_process", str(file), str(num_slots), endpoint.address]
    process = subprocess.Popen([*command, str(endpoint.epoch)], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "connected":
        raise RuntimeError(f"the drafter's process ended with status {process.wait()}; its error is above")
    return process


HEADERS = ["drafter", "requests", "tokens/s", "step, ms", "tokens a step", "goal"]


def table_rows(found: list[Placed]) -> list[list[str]]:
    return [
        [
            each.title,
            str(each.batch_size),
            *(
                "no second GPU" if value is None and place == 0 else "-" if value is None else f"{value:.{digits}f}"
                for place, (value, digits) in enumerate(
                    ((each.tokens_per_s, 0), (each.step_ms, 2), (each.tokens_per_step, 2))
                )
            ),
            "" if each.goal is None else f">= {each.goal:.0f}",
        ]
        for each in found
    ]
