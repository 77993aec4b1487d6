"""Before an engine is ready, it has captured all graphs and called all kernels, and so has a drafter that connects."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.propose_context import ProposeContext
from specray.step import BucketSeconds
from specray.worker.buckets import draft_buckets
from specray.worker.graph_backend import GraphBackend
from specray.worker.remote_drafter import source
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up
from specray.worker.worker import Worker
from tests.support.colocated import colocated_worker
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs
from tests.support.methods import METHODS

PARAMS = [
    SamplingParams(temperature=heat, top_p=top_p, seed=0, max_tokens=12, ignore_eos=True)
    for heat, top_p in ((0.0, 1.0), (0.9, 1.0), (0.9, 0.8))
]


@pytest.fixture
def graphs() -> Iterator[list[RecordedGraphs]]:
    with recorded_graphs() as graphs:
        yield graphs


def config_of(toy: Path, speculative: SpeculativeConfig) -> EngineConfig:
    sizes = {"max_total_tokens": 1024, "max_running_requests": 3, "num_threads": 1}
    return EngineConfig(model=str(toy), dtype="float32", device="cpu", speculative=speculative, **sizes)


@contextmanager
def ready_worker(config: EngineConfig, folder: Path, placement: str) -> Iterator[Worker]:
    """A worker that is ready; `colocated`: its drafter is connected, and drafts in a thread."""
    if placement == "inline":
        worker = start_worker(config)
        warm_up(worker, config)
        yield worker
        return
    with colocated_worker(config, folder) as worker:
        yield worker


def run_requests(worker: Worker, config: EngineConfig) -> Engine:
    worker.capacity = worker.capacity._replace(max_draft_tokens=worker.drafts.max_draft_tokens)
    engine = Engine(config, StepLoop(worker), load_tokenizer(Path(config.model)).backend_tokenizer)
    for place, params in enumerate(PARAMS):
        engine.add_request(EngineRequest(str(place), [5, 6, 7 + place], params))
    while engine.has_work:
        engine.step()
    return engine


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_no_request_waits_for_a_capture(
    placement: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    config = config_of(toy, METHODS["EAGLE3"](toy, tmp_path))
    with ready_worker(config, tmp_path, placement) as worker:
        before = [each.num_captures for each in graphs]
        run_requests(worker, config)
    assert [each.num_captures for each in graphs] == before
    assert any(key[0] == "verify" and key[1].nodes > 1 for key in graphs[0].replayed)  # type: ignore[index]


def test_a_drafter_that_compiles_for_long_is_not_frozen(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first draft of each kind takes longer than a target waits; `graphs` is here for drafts that are compiled."""
    del graphs
    propose, compiled = EagleDrafter.propose, set()

    def slow_at_first(drafter: EagleDrafter, context: ProposeContext) -> DraftTree:
        is_prompt = any(request.start == 0 for request in context.requests)
        if (drafter, is_prompt) not in compiled:
            compiled.add((drafter, is_prompt))
            time.sleep(2.4)
        return propose(drafter, context)

    for wait in ("FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 2.0)  # long enough for an ordinary draft on a busy machine
    monkeypatch.setattr(EagleDrafter, "propose", slow_at_first)
    config = config_of(toy, METHODS["EAGLE3"](toy, tmp_path))
    with ready_worker(config, tmp_path, "colocated") as worker:
        engine = run_requests(worker, config)
        assert isinstance(worker.drafts, RemoteDrafts)
        assert worker.drafts._peer is not None
    faults = engine.stats.labelled["specray_draft_faults_total"]
    assert (faults["frozen"], faults["gone"]) == (0, 0)


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_buckets_are_timed_before_the_first_request(
    placement: str,
    toy: Path,
    tmp_path: Path,
    graphs: list[RecordedGraphs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of steps of equal trees. The budget gets these times, and the request table stays as it was."""
    config = config_of(toy, METHODS["EAGLE3"](toy, tmp_path))
    waits: list[object] = []

    def measure(backend: GraphBackend) -> list[BucketSeconds]:
        before = backend._table._buffer.clone()
        found = backend._graphs.measure(lambda: waits.append(None))
        assert torch.equal(backend._table._buffer, before)
        return found

    monkeypatch.setattr(GraphBackend, "measure", measure)
    with ready_worker(config, tmp_path, placement) as worker:
        timed = worker.bucket_seconds
        engine = run_requests(worker, config)
    equal = draft_buckets(3, max(each.num_nodes for each in timed))
    assert {each[:2] for each in timed} == {(1, 1), (2, 1), (3, 1), *((bucket.rows, bucket.nodes) for bucket in equal)}
    assert all(each.target > 0 for each in timed)
    assert all((each.draft > 0) == (placement == "inline" and each.num_nodes > 1) for each in timed)
    assert engine.drafter.bucket_seconds == timed
    kinds = sum(key[0] == "forward" for key in graphs[0].captured) + sum(each.draft > 0 for each in timed)  # type: ignore[index]
    assert len(waits) == 4 * kinds, "the device ends before each of two times, and after it"


@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM", "SEVERAL", None])
def test_made_up_requests_leave_nothing_behind(
    name: str | None, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    speculative = SpeculativeConfig() if name is None else METHODS[name](toy, tmp_path)
    config = config_of(toy, speculative)
    with ready_worker(config, tmp_path, "inline") as worker:
        assert not worker._table.states
        assert worker.num_started == 0
        assert graphs[0].replayed
        run_requests(worker, config)


@pytest.mark.parametrize("pool", [16, 64])
def test_a_pool_that_is_too_small_for_a_made_up_request_has_none(
    pool: int, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    config = config_of(toy, METHODS["EAGLE3"](toy, tmp_path)).model_copy(update={"max_total_tokens": pool})
    del graphs
    with ready_worker(config, tmp_path, "inline") as worker:
        assert not worker._table.states
