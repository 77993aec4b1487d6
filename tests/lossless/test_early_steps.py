"""Steps with drafts begin before the host has the outcome of those before them, in graphs, and the output stays."""

import fcntl
import json
import math
import resource
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.models.tokenizer import load_tokenizer
from specray.ops.host_copy import HostCopy
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree
from specray.step import DraftLimit, StepPlan, StepResult
from specray.step_wire import pack, unpack_result
from specray.testing.conformance import PROMPTS, SAMPLED, require_equal
from specray.worker import buckets
from specray.worker.decode_graphs import DecodeGraphs
from specray.worker.draft_graphs import DraftGraphs
from specray.worker.input_batch import StepBatch
from specray.worker.padded_step import CopiedOutcome
from specray.worker.remote_drafter import handshake, server, source
from specray.worker.remote_drafter.device_trees import DeviceTrees
from specray.worker.remote_drafter.ring import NUM_REGIONS
from specray.worker.remote_drafter.server import DraftServer, make_draft_server, remote_target_view
from specray.worker.served_loop import ServedLoop
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up
from specray.worker.worker import Worker
from tests.support.colocated import awaiting, colocated_worker, serving
from tests.support.engine import generate, make_llm
from tests.support.fake_ipc import fake_ipc
from tests.support.graph_stand_in import recorded_graphs
from tests.support.host_events import LAUNCH, host_events, launches_in
from tests.support.host_reads import HostReads
from tests.support.methods import METHODS

EPOCH = 7
NAMES = ["EAGLE3", "MTP-stack", "STANDALONE-tree"]
SOME = slice(0, 4)  # of the prompts
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=30, ignore_eos=True)
ORDER = "order"
COUNTS = [f"specray_spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[bool, bool]]]:
    """On the stand-in for graphs, how many steps began early, and with drafts: (early, with drafts) -> steps."""
    counts: Counter[tuple[bool, bool]] = Counter()
    begin = Worker.begin

    def counted(worker: Worker, plan: StepPlan) -> None:
        begin(worker, plan)
        started = worker._started[-1]
        if started.started is not None:
            counts[started.is_early, started.started.batch.tree.max_depth > 0] += 1

    monkeypatch.setattr(Worker, "begin", counted)
    with recorded_graphs():
        yield counts


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[Completion]:
    """Of SOME requests, each step begun when the one before is known."""
    return with_torch(toy, PROMPTS[SOME], SAMPLED[SOME], disable_overlap_schedule=True)


@pytest.fixture(scope="module")
def greedy(toy: Path) -> Completion:
    [completion] = with_torch(toy, [[5, 6, 7]], GREEDY)
    return completion


def with_torch(*args: Any, **options: Any) -> list[Completion]:
    """What torch's operations generate, without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        return generate(*args, disable_cuda_graph=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_output_does_not_depend_on_when_steps_begin(
    name: str, toy: Path, plain: list[Completion], tmp_path: Path, begun: Counter[tuple[bool, bool]]
) -> None:
    begun.clear()
    found = generate(
        toy, PROMPTS[SOME], SAMPLED[SOME], max_running_requests=2, speculative=METHODS[name](toy, tmp_path)
    )
    require_equal(found, plain)
    assert begun[True, True] > 10, begun


def test_as_many_drafts_are_accepted(toy: Path, tmp_path: Path, begun: Counter[tuple[bool, bool]]) -> None:
    """The drafter has read all that it would have read from the host."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    usages = []
    for is_disabled in (True, False):
        options = {"speculative": METHODS["EAGLE3"](toy, tmp_path), "disable_overlap_schedule": is_disabled}
        [choice] = generate(toy, [[5, 6, 7]], params, max_running_requests=1, **options)
        usages.append(choice.usage)
        assert bool(begun[True, True]) != is_disabled
    assert usages[0] == usages[1]


def test_the_host_reads_nothing_between_an_outcome_and_the_next_launch(
    toy: Path, tmp_path: Path, begun: Counter[tuple[bool, bool]]
) -> None:
    """Nor does that launch wait for an outcome: the one of step k is read behind the launch of step k + 1."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with make_llm(toy, max_running_requests=1, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        begun.clear()
        with host_events() as events:
            llm.generate([[5, 6, 7]], params)
    assert begun[True, True] > 5, begun
    launches = launches_in(events)
    assert launches.early_without_reads == launches.early >= begun[True, True] - 1, events


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE-chain"])
def test_predicted_output_saves_as_many_steps(name: str, toy: Path, tmp_path: Path, begun: object) -> None:  # noqa: ARG001
    """Its chains may be longer than a head's paths, and the host makes them."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    num_steps = []
    for is_disabled in (True, False):
        options = {"speculative": METHODS[name](toy, tmp_path), "disable_overlap_schedule": is_disabled}
        with make_llm(toy, max_running_requests=1, **options) as llm:
            [[plain]] = (generation.choices for generation in llm.generate([[5, 6, 7]], params))
            [[choice]] = (
                generation.choices for generation in llm.generate([[5, 6, 7]], params, predictions=[plain.token_ids])
            )
        assert choice.token_ids == plain.token_ids
        assert choice.usage is not None
        num_steps.append(choice.usage.num_verify_steps)
    assert num_steps[0] == num_steps[1] < 30


class RouterSide:
    """An Executor at the router's end of a channel. `waits` is set while it has no plan to send."""

    def __init__(self, channel: Channel, capacity: Capacity) -> None:
        self.capacity, self._channel = capacity, channel
        self.waits = threading.Event()

    def submit(self, plan: StepPlan) -> None:
        self._channel.send(pack(plan))

    def collect(self) -> StepResult:
        self.waits.set()
        result = unpack_result(self._channel.recv(60.0))
        self.waits.clear()
        return result

    def close(self) -> None:
        self._channel.close()


@pytest.mark.parametrize("name", [None, "EAGLE3"])
def test_ranks_behind_a_router_begin_early(
    name: str | None,
    toy: Path,
    plain: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: Counter[tuple[bool, bool]],
) -> None:
    begun.clear()
    speculative = SpeculativeConfig() if name is None else METHODS[name](toy, tmp_path)
    sizes = {"max_total_tokens": 4096, "max_running_requests": 2, "num_threads": 1}
    config = EngineConfig(model=str(toy), dtype="float32", device="cpu", speculative=speculative, **sizes)
    worker = start_worker(config)
    warm_up(worker, config)
    ours, theirs = socket.socketpair()
    router = RouterSide(Channel(theirs, EPOCH), worker.capacity._replace(max_plans=2))
    # A device that is busy until the router has sent all that it can.
    monkeypatch.setattr(CopiedOutcome, "is_there", property(lambda _: router.waits.wait(0.001) and not ready(ours)))

    def serve() -> None:
        with torch.inference_mode():
            ServedLoop(worker).serve(Channel(ours, EPOCH))

    thread = threading.Thread(target=serve)
    thread.start()
    engine = Engine(config, router, load_tokenizer(toy).backend_tokenizer)
    tokens: dict[str, list[int]] = {}
    for place, (prompt, params) in enumerate(zip(PROMPTS[SOME], SAMPLED[SOME], strict=True)):
        engine.add_request(EngineRequest(str(place), prompt, params))
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    router.close()
    thread.join(30.0)
    assert not thread.is_alive()
    assert [tokens[str(place)] for place in range(len(plain))] == [choice.token_ids for choice in plain]
    assert begun[True, name is not None] > 5, begun


def ready(connection: socket.socket) -> bool:
    return Channel(connection, EPOCH).poll(0.0)


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a busy machine."""
    for name in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, name, 60.0)


@pytest.fixture
def prompt_replies(monkeypatch: pytest.MonkeyPatch, long_waits: None) -> None:  # noqa: ARG001
    monkeypatch.setattr(source._Peer, "receive", awaiting(source._Peer.receive))


def colocated_config(toy: Path, folder: Path, num_requests: int, name: str = "EAGLE3") -> EngineConfig:
    return EngineConfig(
        model=str(toy),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_total_tokens=1024,
        max_running_requests=num_requests,
        speculative=METHODS[name](toy, folder),
    )


def engine_of(worker: Worker, config: EngineConfig) -> Engine:
    """An engine in this process over a worker whose drafter is connected."""
    sizes = {"max_draft_tokens": worker.drafts.max_draft_tokens, "max_plans": 2}
    worker.capacity = worker.capacity._replace(**sizes)
    return Engine(config, StepLoop(worker), load_tokenizer(Path(config.model)).backend_tokenizer)


def tokens_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
    for place, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(EngineRequest(str(place), prompt, each))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    return list(tokens.values())


@pytest.mark.usefixtures("long_waits")
def test_the_host_reads_nothing_between_an_outcome_and_the_next_launch_with_a_drafter_in_another_process(
    toy: Path, greedy: Completion, tmp_path: Path, begun: Counter[tuple[bool, bool]]
) -> None:
    """It drafts after the outcome, whose tokens it is sent, and its trees are known to the host."""
    config = colocated_config(toy, tmp_path, 1)
    with colocated_worker(config, tmp_path) as worker:
        begun.clear()
        engine = engine_of(worker, config)
        with host_events() as events:
            [tokens] = tokens_of(engine, [[5, 6, 7]], [GREEDY])
    assert tokens == greedy.token_ids
    assert begun[False, True] > 5, begun
    assert launches_in(events).without_reads >= begun[False, True] - 1, events
    assert engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 10
    assert engine.stats.values["specray_late_drafts_total"] == 0


@pytest.mark.usefixtures("prompt_replies")
def test_a_drafter_in_another_process_is_told_to_draft_before_the_host_has_the_outcome(
    toy: Path, greedy: Completion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Counter[tuple[bool, bool]]
) -> None:
    """The target's host reads nothing between an outcome and the next launch, which does not wait for an outcome."""
    config = colocated_config(toy, tmp_path, 1)
    put_outcome, events = DeviceTrees.put_outcome, list[str]()

    def put(trees: DeviceTrees, region: int, outcome: torch.Tensor) -> None:
        put_outcome(trees, region, outcome)
        events.append(ORDER)

    monkeypatch.setattr(DeviceTrees, "put_outcome", put)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        begun.clear()
        engine = engine_of(worker, config)
        with host_events() as events:
            [tokens] = tokens_of(engine, [[5, 6, 7]], [GREEDY])
    assert tokens == greedy.token_ids
    assert begun[True, True] > 5, begun
    orders = [place for place, event in enumerate(events) if event == ORDER]
    assert len(orders) >= begun[True, True]
    assert all(events[place - 1] == LAUNCH for place in orders), events  # of the step that it drafts after
    launches = launches_in([event for event in events if event != ORDER])
    assert launches.early_without_reads == launches.early >= begun[True, True] - 1, events
    assert engine.stats.values["specray_late_drafts_total"] == 0


@pytest.mark.usefixtures("prompt_replies")
@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_is_told_early_drafts_as_much_as_one_in_the_same_process(
    name: str, toy: Path, tmp_path: Path, begun: Counter[tuple[bool, bool]]
) -> None:
    config = colocated_config(toy, tmp_path, 2, name)
    params = [replace(each, max_tokens=24) for each in SAMPLED[SOME]]
    with make_llm(toy, max_running_requests=2, speculative=config.speculative) as llm:
        expected = [generation.choices[0].token_ids for generation in llm.generate(PROMPTS[SOME], params)]
        inline = {name: llm.engine.stats.values[name] for name in COUNTS}
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        begun.clear()
        engine = engine_of(worker, config)
        assert tokens_of(engine, PROMPTS[SOME], params) == expected
    assert begun[True, True] > 10, begun
    assert {name: engine.stats.values[name] for name in COUNTS} == inline


@pytest.mark.usefixtures("long_waits")
def test_the_host_of_a_drafter_reads_nothing_and_does_not_wait_for_its_device(
    toy: Path,
    plain: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: Counter[tuple[bool, bool]],
) -> None:
    """It launches what drafts after the next step before it has replied, until the regions are used up."""
    draft_early, unsent = DraftServer._draft_early, list[int]()

    def counted(drafter: DraftServer, *args: Any) -> None:
        unsent.append(len(drafter._unsent))
        with HostReads() as reads:
            draft_early(drafter, *args)
        assert not reads.places

    class BusyDevice(HostCopy):
        is_there = False

    config = colocated_config(toy, tmp_path, 2)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        begun.clear()
        monkeypatch.setattr(DraftServer, "_draft_early", counted)
        monkeypatch.setattr(server, "HostCopy", BusyDevice)
        engine = engine_of(worker, config)
        found = tokens_of(engine, PROMPTS[SOME], SAMPLED[SOME])
    assert found == [choice.token_ids for choice in plain]
    assert begun[True, True] > 5, begun
    assert max(unsent) == NUM_REGIONS - 2, unsent
    assert not any(engine.stats.labelled["specray_draft_faults_total"].values())


def test_trees_that_the_device_waits_for_in_vain_do_not_change_the_output(
    toy: Path,
    plain: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: Counter[tuple[bool, bool]],
) -> None:
    """Some never come, and some have an earlier order's number; the steps are launched before the host knows."""
    put = DeviceTrees.put

    def put_some(trees: DeviceTrees, region: int, number: int, tree: DraftTree | None) -> None:
        if number % 8 != 3:
            put(trees, region, number - (number % 8 == 7), tree)

    monkeypatch.setattr(source, "LEAST_WAIT_S", 0.1)
    monkeypatch.setattr(source, "LATE_FACTOR", 0.0)
    monkeypatch.setattr(source, "FROZEN_S", 60.0)
    config = colocated_config(toy, tmp_path, 2)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        begun.clear()
        monkeypatch.setattr(DeviceTrees, "put", put_some)
        engine = engine_of(worker, config)
        found = tokens_of(engine, PROMPTS[SOME], SAMPLED[SOME])
    assert found == [choice.token_ids for choice in plain]
    assert begun[False, True] + begun[True, True] > 10, begun
    assert engine.stats.values["specray_late_drafts_total"] > 2
    assert engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 10
    assert not any(engine.stats.labelled["specray_draft_faults_total"].values())


class BrokenDrafter:
    """What a drafter does from its fifth early order on; `is_over` is set when the target is done."""

    def __init__(self) -> None:
        self.num_orders, self.is_over = 0, threading.Event()

    def dies(self, drafter: DraftServer) -> None:  # noqa: ARG002
        raise ChannelClosedError("as if the process had been killed")

    def freezes(self, drafter: DraftServer) -> None:  # noqa: ARG002
        assert self.is_over.wait(60.0)

    def is_late(self, drafter: DraftServer) -> None:  # noqa: ARG002
        if self.num_orders % 4 == 1:
            time.sleep(0.3)

    def lies_about_what_it_can(self, drafter: DraftServer) -> None:
        assert drafter._graphs is not None
        drafter._graphs.early_nodes = lambda _: 1 << 40  # type: ignore[method-assign]

    def draws_what_is_not_a_number(self, drafter: DraftServer) -> None:
        assert drafter._graphs is not None
        drafter._graphs._drafts._num_nodes = torch.zeros(64, dtype=torch.int64)


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (BrokenDrafter.dies, "gone"),
        (BrokenDrafter.freezes, "frozen"),
        (BrokenDrafter.is_late, "late"),
        (BrokenDrafter.lies_about_what_it_can, None),
        (BrokenDrafter.draws_what_is_not_a_number, "nan"),
    ],
    ids=["dead", "frozen", "late", "lying", "nan"],
)
def test_a_drafter_that_breaks_after_it_was_told_early_costs_its_drafts_alone(
    fault: Callable[[BrokenDrafter, DraftServer], None],
    kind: str | None,
    toy: Path,
    plain: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: Counter[tuple[bool, bool]],
) -> None:
    broken, draft_early = BrokenDrafter(), DraftServer._draft_early

    def breaking(drafter: DraftServer, *args: Any) -> None:
        broken.num_orders += 1
        if broken.num_orders == 4:
            monkeypatch.setattr(source, "LEAST_WAIT_S", 0.1)
            monkeypatch.setattr(source, "FROZEN_S", 0.4 if kind == "frozen" else 60.0)
        if broken.num_orders > 4:
            fault(broken, drafter)
        draft_early(drafter, *args)

    monkeypatch.setattr(source, "LATE_FACTOR", 0.0)
    config = colocated_config(toy, tmp_path, 2)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        begun.clear()
        monkeypatch.setattr(DraftServer, "_draft_early", breaking)
        engine = engine_of(worker, config)
        found = tokens_of(engine, PROMPTS[SOME], SAMPLED[SOME])
        broken.is_over.set()
    assert found == [choice.token_ids for choice in plain]
    assert broken.num_orders >= 4, begun
    faults = engine.stats.labelled["specray_draft_faults_total"]
    late = {"late": 1.0} if engine.stats.values["specray_late_drafts_total"] else {}
    noticed = {name for name, number in (faults | late).items() if number} - ({"late"} if kind != "late" else set())
    assert noticed == ({kind} if kind else set())


@pytest.fixture
def early_orders(monkeypatch: pytest.MonkeyPatch, prompt_replies: None) -> list[DraftServer]:  # noqa: ARG001
    """The drafter of each early order."""
    draft_early, drafters = DraftServer._draft_early, list[DraftServer]()

    def recorded(drafter: DraftServer, *args: Any) -> None:
        drafters.append(drafter)
        draft_early(drafter, *args)

    monkeypatch.setattr(DraftServer, "_draft_early", recorded)
    return drafters


def test_no_order_is_early_if_no_graph_holds_whole_trees(
    toy: Path,
    plain: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    early_orders: list[DraftServer],
    begun: Counter[tuple[bool, bool]],
) -> None:
    """The host knows the sizes of trees too late then, which are mostly smaller."""
    monkeypatch.setattr(buckets, "MAX_TOKENS", 12)
    config = colocated_config(toy, tmp_path, 2)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        early_orders.clear()
        begun.clear()
        engine = engine_of(worker, config)
        found = tokens_of(engine, PROMPTS[SOME], SAMPLED[SOME])
    assert found == [choice.token_ids for choice in plain]
    assert begun[False, True] > 10, begun
    assert not early_orders
    assert engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 10


@pytest.mark.usefixtures("begun")
def test_requests_longer_than_a_draft_model_reads_end_early_orders(
    toy: Path, greedy: Completion, tmp_path: Path, early_orders: list[DraftServer]
) -> None:
    """Some that were sent before the host knew the length are past its last position."""
    config = colocated_config(toy, tmp_path, 1, "STANDALONE-tree")
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 18}))
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        early_orders.clear()
        engine = engine_of(worker, config)
        assert tokens_of(engine, [[5, 6, 7]], [GREEDY]) == [greedy.token_ids]
    assert 2 < len(early_orders) < 18, len(early_orders)
    assert not any(engine.stats.labelled["specray_draft_faults_total"].values())


@pytest.mark.usefixtures("prompt_replies", "begun")
def test_a_request_whose_logits_are_not_finite_leaves_the_others_their_drafter(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden states are not either, and the drafter reads them before the host knows."""
    verify, are_broken = DecodeGraphs.verify, list[bool]()

    def broken(graphs: DecodeGraphs, batch: StepBatch, bucket: buckets.Bucket, limits: Sequence[DraftLimit]) -> Any:
        breaks = not any(are_broken) and len(are_broken) > 8 and len(batch.num_nodes) == 2
        if breaks:
            first = int(graphs._step._num_nodes[0])
            graphs._step._logits[:first] = math.nan
            graphs._step._aux[:first] = math.nan
        outcome, drafts = verify(graphs, batch, bucket, limits)
        are_broken.append(breaks and drafts is not None)
        return outcome, drafts

    prompts, params = [[5, 6, 7], [8, 9, 10]], [replace(GREEDY, max_tokens=50)] * 2
    plain = generate(toy, prompts, params, disable_cuda_graph=True)
    config = colocated_config(toy, tmp_path, 2)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        monkeypatch.setattr(DecodeGraphs, "verify", broken)
        engine = engine_of(worker, config)
        found = tokens_of(engine, prompts, params)
    assert any(are_broken)
    assert len(found[0]) < 50
    assert found[1] == plain[1].token_ids
    assert not any(engine.stats.labelled["specray_draft_faults_total"].values())


@pytest.mark.usefixtures("begun")
def test_a_drafter_that_wants_no_more_early_orders_gets_none(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early_orders: list[DraftServer]
) -> None:
    early_nodes = DraftGraphs.early_nodes
    monkeypatch.setattr(DraftGraphs, "early_nodes", lambda *args: early_nodes(*args) * (len(early_orders) < 4))
    config = colocated_config(toy, tmp_path, 1)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        early_orders.clear()
        tokens_of(engine_of(worker, config), [[5, 6, 7]], [GREEDY])
    assert len(early_orders) == 4


@pytest.mark.usefixtures("begun")
def test_a_long_prompt_does_not_lengthen_the_waits_for_early_orders(
    toy: Path, tmp_path: Path, early_orders: list[DraftServer]
) -> None:
    """Nor are the seconds of another order's drafts those of a step."""
    config = colocated_config(toy, tmp_path, 1)
    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        assert isinstance(worker.drafts, source.RemoteDrafts)
        peer = worker.drafts._peer
        assert peer is not None
        early_orders.clear()
        peer._recent = deque([9.0], maxlen=8)
        tokens_of(engine_of(worker, config), [[5, 6, 7]], [GREEDY])
        assert len(early_orders) > 8
        assert max(peer._recent) < 9.0
        assert min(peer._recent) > 0.0  # or a slow drafter would be late after as many early replies
        assert worker.drafts.seconds == 0.0


@pytest.mark.usefixtures("begun")
def test_early_orders_need_no_small_descriptor(toy: Path, tmp_path: Path, early_orders: list[DraftServer]) -> None:
    config = colocated_config(toy, tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))

    def listening(address: str) -> socket.socket:
        with handshake.listen(address) as small:
            large = socket.socket(fileno=fcntl.fcntl(small.fileno(), fcntl.F_DUPFD, 1024))
        large.setblocking(False)
        return large

    try:
        with pytest.MonkeyPatch.context() as patch, fake_ipc():
            patch.setattr(source, "listen", listening)
            with colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
                early_orders.clear()
                tokens_of(engine_of(worker, config), [[5, 6, 7]], [GREEDY])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(early_orders) > 5


@pytest.mark.usefixtures("prompt_replies", "begun")
def test_a_drafter_is_replaced_between_two_steps_that_would_begin_early(
    toy: Path, plain: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a request whose drafts the old one still makes goes on with the new one."""
    draft_early, orders = DraftServer._draft_early, Counter[int]()
    threads: list[threading.Thread] = []
    config = colocated_config(toy, tmp_path, 2)
    assert config.max_total_tokens is not None
    following = make_draft_server(config, remote_target_view(config), config.max_total_tokens)

    def counted(drafter: DraftServer, *args: Any) -> None:
        orders[id(drafter)] += 1
        if not threads and orders[id(drafter)] == 4:
            threads.append(serving(following, tmp_path))
        draft_early(drafter, *args)

    with fake_ipc(), colocated_worker(config, tmp_path, uses_cuda_ipc=True) as worker:
        monkeypatch.setattr(DraftServer, "_draft_early", counted)
        engine = engine_of(worker, config)
        found = tokens_of(engine, PROMPTS[SOME], SAMPLED[SOME])
        worker.drafts.close()  # type: ignore[attr-defined]
        threads[0].join(30.0)
    assert found == [choice.token_ids for choice in plain]
    assert len(orders) == 2
    assert orders[id(following)] > 2, orders
    assert not any(engine.stats.labelled["specray_draft_faults_total"].values())
