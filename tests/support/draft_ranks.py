"""A target of several ranks and a drafter of as many, each in a process of its own, without Ray."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import make_sampling_params
from specray.step import StepResult
from specray.worker.remote_drafter import source
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.remote_drafter.server import make_draft_server, remote_target_view
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.startup import start_worker
from specray.worker.warm_up import warm_up
from tests.support.colocated import awaiting
from tests.support.fake_ipc import fake_ipc
from tests.support.graph_stand_in import recorded_graphs
from tests.support.host_events import Launches, host_events, launches_in
from tests.support.processes import has_ended, wait_until
from tests.support.two_ranks import PROCESSES, TIMEOUT_S, RankZero, follow, launches_of

# Steps until the first drafter is late, until it ends, and without drafts after either.
STEPS_IN_TIME, STEPS_BEFORE, STEPS_WITHOUT = 3, 12, 3
LONG_S = 5.0  # for a drafter that is in time
CATCH_UP_S = 0.5  # before a step, for a drafter that was late


class Seen(NamedTuple):
    """What a run generated, the drafts that were verified, and the faults that the target saw."""

    token_ids: list[list[int]]
    drafts: list[int]  # until the first fault begins, until it ends, until the next one begins, ..., until the end
    faults: list[str]
    accept_length: float  # mean of accepted + 1
    launches: list[Launches]  # of each rank, on the stand-in for graphs


class Counting(RankZero):
    """Counts drafts and faults. Has the sizes of a drafter that has connected."""

    num_drafts = 0

    def __init__(self, worker: Any, max_plans: int) -> None:
        super().__init__(worker)
        self.max_plans, self.faults = max_plans, list[str]()
        self._drafts: RemoteDrafts = worker.drafts

    @property
    def capacity(self) -> Capacity:
        known = {"max_draft_tokens": self.most, "reads_next_token": True, "max_plans": self.max_plans}
        return self.worker.capacity._replace(**known)

    def await_drafter(self) -> None:
        self._drafts.await_drafter(TIMEOUT_S)
        self.most = self._drafts.max_draft_tokens

    def collect(self) -> StepResult:
        result = super().collect()
        self.num_drafts += sum(row.num_draft_tokens for row in result.rows)
        self.faults += result.draft_faults
        return result


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def run_draft_ranks(
    folder: Path,
    speculative: SpeculativeConfig,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    fault: Callable[[int], None] | None = None,
    lies: bool = False,
    is_late: bool = False,
    size: int = 2,
    in_graphs: bool = False,
    uses_cuda_ipc: bool = False,
) -> Seen:
    """Generate. `fault` happens to the last rank of the drafter, and another drafter takes over.

    `lies`: that rank computes something else. `is_late`: it stands still for some steps before. `in_graphs`: on the
    stand-in for CUDA graphs. `uses_cuda_ipc`: through the memory of a GPU.
    """
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 2048}
    options |= {"max_running_requests": 2}
    config = EngineConfig(model=str(folder), tp_size=size, speculative=speculative, **options)
    with tempfile.TemporaryDirectory() as meeting:
        endpoint, ranks = DraftEndpoint(f"{meeting}/drafts", 7, uses_cuda_ipc=uses_cuda_ipc), range(1, size)
        runs = [(config, f"file://{meeting}/ranks")]
        ways = in_graphs, False, nullcontext, endpoint
        others = [PROCESSES.Process(target=follow, args=(runs, rank, *ways)) for rank in ranks]
        # The target's process could start drafters only from a fork server of its own, which would import all again.
        drafters = [
            [PROCESSES.Process(target=_draft, args=(config, rank, own, endpoint, how)) for rank in range(size)]
            for own, how in ((f"{meeting}/first", (in_graphs, lies)), (f"{meeting}/second", (in_graphs, False)))
        ]
        processes = [*others, *drafters[0], *drafters[1]]
        for process in processes:
            process.start()
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as first:
            try:
                pids = [[_pid(process) for process in each] for each in drafters]
                arguments = config, meeting, endpoint, pids, in_graphs, prompts, params, fault, is_late
                seen = first.submit(_lead, in_graphs, fault, partial(_generate, *arguments)).result(TIMEOUT_S)
                for process in others:  # rank 0 has closed the group
                    process.join(TIMEOUT_S)
                return seen._replace(launches=seen.launches + launches_of(runs[0][1], ranks))
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _lead(in_graphs: bool, fault: Callable[[int], None] | None, generate: Callable[[], Seen]) -> Seen:
    torch.set_num_threads(1)
    source.FIRST_WAIT_S = source.LEAST_WAIT_S = source.FROZEN_S = LONG_S if fault is stop else TIMEOUT_S
    if fault is not None:
        source.LEAST_WAIT_S = LONG_S  # a device does not notice that a drafter has ended
    else:
        source._Peer.receive = awaiting(source._Peer.receive)  # type: ignore[method-assign]
    with recorded_graphs() if in_graphs else nullcontext(), fake_ipc():
        return generate()


def _generate(
    config: EngineConfig,
    meeting: str,
    endpoint: DraftEndpoint,
    drafters: list[list[int]],  # process ids of the first drafter and of the one that takes over
    in_graphs: bool,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    fault: Callable[[int], None] | None,
    is_late: bool,
) -> Seen:
    worker = start_worker(config, 0, config.tp_size, f"file://{meeting}/ranks", colocate=endpoint)
    rank, num_slots = Counting(worker, max_plans=1 + in_graphs), worker.capacity.num_blocks * config.page_size
    _start_drafter(f"{meeting}/first", num_slots)
    rank.await_drafter()
    warm_up(worker, config)
    engine = Engine(config, rank, load_tokenizer(Path(config.model)).backend_tokenizer)
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(EngineRequest(str(index), prompt, make_sampling_params(**each)))
    token_ids: list[list[int]] = [[] for _ in prompts]
    step, marks = 0, [0]
    with host_events() if in_graphs else nullcontext([]) as events:
        while engine.has_work:
            step += 1
            if is_late and step == STEPS_IN_TIME:
                marks.append(rank.num_drafts)
                source.LEAST_WAIT_S = 0.0
                stop(drafters[0][-1])
            if is_late and step == STEPS_IN_TIME + STEPS_WITHOUT:
                marks.append(rank.num_drafts)
                source.LEAST_WAIT_S = LONG_S
                resume(drafters[0][-1])
            if is_late and step > STEPS_IN_TIME + STEPS_WITHOUT and rank.num_drafts == marks[2]:
                time.sleep(CATCH_UP_S)
            if fault is not None and step == STEPS_BEFORE:
                marks.append(rank.num_drafts)
                fault(drafters[0][-1])
            if fault is not None and step == STEPS_BEFORE + STEPS_WITHOUT:
                marks.append(rank.num_drafts)
                _end(drafters[0])
                _start_drafter(f"{meeting}/second", num_slots)
                rank.await_drafter()
            for output in engine.step():
                assert output.error is None
                token_ids[int(output.request_id)] += output.token_ids
    drafts = [end - start for start, end in pairwise([*marks, rank.num_drafts])]
    worker.close()
    accept_length = rank.num_emitted / max(1, rank.num_verified)
    return Seen(token_ids, drafts, rank.faults, accept_length, [launches_in(events)])


def _start_drafter(folder: str, num_slots: int) -> None:
    """Let the processes go on that wait for this folder."""
    Path(f"{folder}-slots.part").write_text(str(num_slots))
    Path(f"{folder}-slots.part").rename(f"{folder}-slots")


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            kill(pid)
    wait_until(lambda: all(map(has_ended, pids)), TIMEOUT_S)


def _draft(config: EngineConfig, rank: int, folder: str, endpoint: DraftEndpoint, how: tuple[bool, bool]) -> None:
    """Draft with a rank of the drafter that meets in this folder, once it is started. `how`: (in graphs, it lies)."""
    torch.set_num_threads(1)
    slots, (in_graphs, lies) = Path(f"{folder}-slots"), how
    wait_until(slots.exists, TIMEOUT_S)
    view = remote_target_view(config)
    group = RankGroup(rank, config.tp_size, f"file://{folder}", view.device)
    if lies and rank == config.tp_size - 1:
        add = group.sum
        group.sum = lambda partial: add(partial.mul_(-3.0))  # type: ignore[method-assign]
    with recorded_graphs() if in_graphs else nullcontext(), fake_ipc(), torch.inference_mode():
        server = make_draft_server(config, replace(view, group=group), int(slots.read_text()))
        if rank == 0:
            server.serve(endpoint.address, endpoint.epoch)
        else:
            server.follow()
