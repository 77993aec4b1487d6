"""Tensor parallelism without Ray: a process for each rank, forked from one that has imported the worker once."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.models.tokenizer import load_tokenizer
from specray.outputs import FinishReason
from specray.sampling_params import make_sampling_params
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TreeRows
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.step import DraftLimit, StepResult
from specray.worker import startup
from specray.worker.rank_worker import RankWorker
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up
from tests.support.forked import IMPORTED
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs
from tests.support.host_events import Launches, host_events, launches_in

TIMEOUT_S = 600.0  # a green test never waits for it: up to seven processes share a busy core, in the interpreter
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, *IMPORTED])


class RankZero(StepLoop):
    """Executor over this process's worker; plans are sent to the other ranks too."""

    num_verified = num_emitted = 0  # trees with drafts, and tokens of their steps

    def collect(self) -> StepResult:
        result = super().collect()
        emitted = [len(row.token_ids) for row in result.rows if row.num_draft_tokens]
        self.num_verified, self.num_emitted = self.num_verified + len(emitted), self.num_emitted + sum(emitted)
        return result


class RankRun(NamedTuple):
    """What several ranks generated."""

    choices: list[dict[str, Any]]
    accept_length: float  # mean of accepted + 1
    launches: list[Launches]  # of each rank, on the stand-in for graphs


def run_ranks(
    folder: Path,
    size: int,
    speculative: SpeculativeConfig,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    in_graphs: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Choices of `prompts` from `size` processes; `in_graphs`: on the stand-in for CUDA graphs."""
    [run] = run_methods(folder, size, [speculative], prompts, params, in_graphs, **options)
    return run.choices


def run_methods(
    folder: Path,
    size: int,
    methods: Sequence[SpeculativeConfig],
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    in_graphs: bool = False,
    is_unlike: bool = False,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> list[RankRun]:
    """The same with one method after the other, in the same processes. `is_unlike`: see `follow`.

    `within`: a context of each rank, besides the stand-in for graphs.
    """
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 4096} | options
    configs = [EngineConfig(model=str(folder), tp_size=size, speculative=method, **options) for method in methods]
    with tempfile.TemporaryDirectory() as meeting:
        addresses = [f"file://{meeting}/ranks{number}" for number in range(len(methods))]
        runs = list(zip(configs, addresses, strict=True))
        ways = (in_graphs, is_unlike, within)
        others = [PROCESSES.Process(target=follow, args=(runs, rank, *ways)) for rank in range(1, size)]
        for process in others:
            process.start()
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as first:
            try:
                found = first.submit(lead, runs, prompts, params, in_graphs, within).result(TIMEOUT_S * len(runs))
                for process in others:  # rank 0 has closed the group
                    process.join(TIMEOUT_S)
                for run, (_, address) in zip(found, runs, strict=True):
                    run.launches.extend(launches_of(address, range(1, size)))
                return found
            finally:
                for process in others:  # without them rank 0 ends too
                    process.kill()
                    process.join()


def lead(
    runs: Sequence[tuple[EngineConfig, str]],
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    in_graphs: bool,
    within: Callable[[], AbstractContextManager[object]],
) -> list[RankRun]:
    """Run rank 0, which drives the others."""
    torch.set_num_threads(1)
    if not in_graphs:
        with within():
            return [_lead(*each, prompts, params) for each in runs]
    with recorded_graphs() as graphs:
        found = [_lead(*each, prompts, params, graphs) for each in runs]
        verified = {key[2:] for key in graphs[0].replayed if key[0] == "verify"}  # type: ignore[index]
        assert verified >= {(True, False), (True, True)}  # sampled, and without or with filters
    return found


def _lead(
    config: EngineConfig,
    address: str,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    graphs: Sequence[RecordedGraphs] = (),
) -> RankRun:
    worker = start_worker(config, 0, config.tp_size, address)
    warm_up(worker, config)
    worker.capacity = worker.capacity._replace(max_plans=1 if config.disable_overlap_schedule else 2)
    num_captures = [each.num_captures for each in graphs]
    rank = RankZero(worker)
    engine = Engine(config, rank, load_tokenizer(Path(config.model)).backend_tokenizer)
    for index, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(EngineRequest(str(index), prompt, make_sampling_params(**options)))
    choices: list[dict[str, Any]] = [{"token_ids": [], "text": ""} for _ in prompts]
    with host_events() if graphs else nullcontext([]) as events:
        _generate(engine, choices)
    launches = launches_in(events)
    if graphs and config.speculative.algorithm != "NGRAM":  # whose drafts the host makes
        assert launches.early, "no step began early"
    assert num_captures == [each.num_captures for each in graphs], "a request waited for a capture"
    worker.close()
    return RankRun(choices, rank.num_emitted / max(1, rank.num_verified), [launches])


def _generate(engine: Engine, choices: list[dict[str, Any]]) -> None:
    """Add all outputs to `choices`."""
    while engine.has_work:
        for output in engine.step():
            choice = choices[int(output.request_id)]
            choice["token_ids"] += output.token_ids
            choice["text"] += output.text
            choice["finish_reason"] = output.finish_reason
            choice["num_cached_tokens"] = output.usage.num_cached_tokens
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = output.prompt_logprobs
            assert output.finish_reason is not FinishReason.ERROR, output.error


def follow(
    runs: Sequence[tuple[EngineConfig, str]],
    rank: int,
    in_graphs: bool,
    is_unlike: bool,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    colocate: DraftEndpoint | None = None,
) -> None:
    """Run another rank until it is killed. `is_unlike`: on another processor, where its trees differ."""
    torch.set_num_threads(1)
    if is_unlike:
        startup._hardware = lambda _: "another"
        InlineDrafts.collect = _no_trees  # type: ignore[assignment, method-assign]
    with recorded_graphs() if in_graphs else nullcontext(), within():
        for config, address in runs:
            worker = start_worker(config, rank, config.tp_size, address, colocate=colocate)
            warm_up(worker, config)
            with host_events() if in_graphs else nullcontext([]) as events, contextlib.suppress(RuntimeError):
                assert isinstance(worker, RankWorker)
                worker.run_loop()  # until rank 0 closes the group
            worker.close()
            _file_of(address, rank).write_text(json.dumps(launches_in(events)))


def launches_of(address: str, ranks: Iterable[int]) -> list[Launches]:
    """Those of ranks above 0 that have ended."""
    return [Launches(*json.loads(_file_of(address, rank).read_text())) for rank in ranks]


def _file_of(address: str, rank: int) -> Path:
    """Where another rank writes its `Launches`."""
    return Path(f"{address.removeprefix('file://')}-{rank}")


def _no_trees(_: InlineDrafts, rows: TreeRows, limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
    return DraftTree.roots(rows.roots), [1] * len(limits)
