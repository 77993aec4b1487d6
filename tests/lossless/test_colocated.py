"""A remote drafter drafts the same trees as an inline one, and its faults do not change the output."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch

from specray.channel import ChannelClosedError
from specray.engine.drafter_selection.selector import DrafterSelector
from specray.errors import ConfigError, EngineDeadError
from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import DraftFaultError, TreeRows, UnsizedTrees
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DraftFault, DraftLimit, StepPlan
from specray.worker.remote_drafter import server, source, wire
from specray.worker.remote_drafter.server import DraftServer
from specray.worker.remote_drafter.wire import DraftReply
from tests.support.colocated import EPOCH, Colocated, Recorded, worker_of
from tests.support.decoders import write_decoder
from tests.support.engine import make_llm, visible
from tests.support.fake_ipc import fake_ipc
from tests.support.methods import METHODS, SOME_METHODS, Make
from tests.support.processes import wait_until

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
PROMPTS = [[*PREFIX, 40, 41, 42], [*PREFIX, 50, 41], [*PREFIX[:8], 33], [5], [0, 2, 4, 2, 4, 2, 4]]
RUNS: dict[str, dict[str, Any]] = {
    "warm-cache": {"page_size": 4},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "preemption": {"page_size": 4, "max_total_tokens": 60},
}


# Broken drafters per fault; SPECRAY_INJECTIONS=100 takes a few minutes.
NUM_INJECTIONS = int(os.environ.get("SPECRAY_INJECTIONS", "3"))
TIMEOUTS = {"LEAST_WAIT_S": 60.0, "FIRST_WAIT_S": 60.0, "FROZEN_S": 60.0}  # long enough for a busy machine


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch)


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """In place of a GPU's, for drafters with `uses_cuda_ipc`: see `device_trees`."""
    with fake_ipc():
        yield


def run(llm: LLM) -> list[Completion]:
    params = [
        SamplingParams(temperature=[0.0, 1.0, 4.0][i % 3], seed=i, max_tokens=12, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [generation.choices[0] for _ in range(2) for generation in llm.generate(PROMPTS, params)]


def faults_of(llm: LLM) -> dict[str, float]:
    stats = llm.engine.stats
    late = {"late": stats.values["specray_late_drafts_total"]}
    counts = stats.labelled["specray_draft_faults_total"] | late
    return {kind: count for kind, count in counts.items() if count}


def recorded(llm: LLM) -> Recorded:
    worker = worker_of(llm)
    worker.drafts = record = Recorded(worker.drafts)  # type: ignore[assignment]
    return record


# Each method crosses the channel in one of the runs, and one of each kind of memory in all of them.
CASES = [(method, options, False) for method, options in zip(METHODS, cycle(RUNS), strict=False)]
CASES += [
    (method, options, False) for method, options in product(SOME_METHODS, RUNS) if (method, options, False) not in CASES
]
CASES += [(method, "preemption", True) for method in ("EAGLE3", "MTP-deepseek", "NGRAM", "SEVERAL")]


@pytest.mark.parametrize(("method", "options", "uses_cuda_ipc"), CASES)
def test_trees_equal_those_of_the_inline_drafter(
    method: str, options: str, uses_cuda_ipc: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which of several drafters a request gets must not depend on measured times here.
    monkeypatch.setattr(DrafterSelector, "record_step", lambda *_: None)
    make: Make = METHODS[method]
    speculative = make(toy, tmp_path)
    with make_llm(toy, speculative=speculative, **RUNS[options]) as llm:
        inline = recorded(llm)
        expected = run(llm)
    with make_llm(toy, speculative=speculative, **RUNS[options]) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc)
        colocated.start()
        record = recorded(llm)
        choices = run(llm)
        colocated.close()
    assert [visible(choice) for choice in choices] == [visible(choice) for choice in expected]
    assert record.trees == inline.trees
    assert sum(len(tree.tokens) > 1 for step in inline.trees for tree in step) > 5  # type: ignore[attr-defined]
    assert record.take_report().faults == []  # type: ignore[operator]


@pytest.mark.parametrize("name", ["qwen3_vl", "gpt_neox"])
def test_a_head_finds_the_matrices_of_a_target_with_other_names(name: str, tmp_path: Path) -> None:
    """The embedding of one is model.language_model.embed_tokens, of the other gpt_neox.embed_in."""
    write_decoder(name, tmp_path)
    speculative = METHODS["EAGLE3"](tmp_path, tmp_path)
    with make_llm(tmp_path, speculative=speculative) as llm:
        inline = recorded(llm)
        expected = run(llm)
    with make_llm(tmp_path, speculative=speculative) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        record = recorded(llm)
        assert [visible(choice) for choice in run(llm)] == [visible(choice) for choice in expected]
        colocated.close()
    assert record.trees == inline.trees


def test_a_target_that_refuses_its_drafter_says_why_on_both_sides(toy: Path, tmp_path: Path) -> None:
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        colocated = Colocated(llm, tmp_path)
        misfit = BrokenDrafter(Fault("refused"), lambda: None)
        misfit.aux_hidden_state_layers = (0, 99)  # type: ignore[assignment]
        refused = DraftServer(misfit, torch.device("cpu"))
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(refused.serve, colocated._endpoint.address, EPOCH)
            with pytest.raises(ConfigError, match=r"refused its drafter: .*aux_hidden_state_layers=\[0, 99\]"):
                colocated.drafts.await_drafter(30.0)
            with pytest.raises(EngineDeadError, match=r"refused this drafter: .*aux_hidden_state_layers=\[0, 99\]"):
                serving.result(30)
        with pytest.raises(EngineDeadError, match=r"no drafter has connected to the target within 0.05 s"):
            colocated.drafts.await_drafter(0.05)
        colocated.start()
        colocated.drafts.await_drafter(30.0)
        colocated.close()


def test_steps_that_commit_more_than_the_ring_holds_are_missed_by_the_drafter_alone(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source.RingLimits, "step_tokens", lambda *_: 3)  # fewer than a prompt has
    with make_llm(toy) as llm:
        expected = [visible(choice) for choice in run(llm)]
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        assert [visible(choice) for choice in run(llm)] == expected
        assert faults_of(llm) == {}
        colocated.close()


@pytest.mark.parametrize(("options", "uses_cuda_ipc"), [*((options, False) for options in RUNS), ("preemption", True)])
def test_replacing_the_drafter_between_steps_does_not_change_the_output(
    options: str, uses_cuda_ipc: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layers, larger trees, another use of the prefix cache or no drafter, while requests run."""
    with make_llm(toy, **RUNS[options]) as llm:
        expected = [visible(choice) for choice in run(llm)]
    names = ["NGRAM-short", "EAGLE3", None, "EAGLE-map", "NGRAM", None, "EAGLE3-wide"]
    made = {name: METHODS[name](toy, tmp_path / name) for name in names if name}
    with make_llm(toy, speculative=made["EAGLE3-wide"], **RUNS[options]) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc)
        worker, sizes = worker_of(llm), set()
        begin, steps = worker.begin, count()

        def switching(plan: StepPlan) -> None:
            step = next(steps)
            name = names[step // 3 % len(names)]
            if step % 3 == 0:
                colocated.start(speculative=made[name]) if name else colocated.dismiss()
            begin(plan)
            sizes.add((worker.drafts.max_draft_tokens, worker.drafts.aux_hidden_state_layers))

        monkeypatch.setattr(worker, "begin", switching)
        choices = [visible(choice) for choice in run(llm)]
        assert choices == expected
        assert faults_of(llm) == {}
        assert llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 50
        assert len(sizes) == len(set(names))  # having no drafter counts as a size
        colocated.close()


class BrokenDrafter:
    """A drafter with a fault in every proposal from the second one on; `stall` only once."""

    max_draft_tokens = 3
    aux_hidden_state_layers = (0, 1)
    reads_next_token = False

    def __init__(self, fault: "Fault", about_to: Callable[[], object]) -> None:
        self.noticed = threading.Event()
        self._fault = fault
        self._about_to = about_to  # called before the first wrong reply
        self._num_proposals = 0

    def propose(self, context: ProposeContext) -> DraftTree:
        self._num_proposals += 1
        assert context.aux_hidden_states is not None
        assert context.aux_hidden_states.shape[1] == 2 * 32
        if self._num_proposals > 1:
            self._fault.draft(self)
        else:
            self._about_to()
        roots = context.roots().tolist()
        return DraftTree.from_lists([TreeLists([root, 3, 4], [NONE, 0, 1]) for root in roots])

    def pack(self, reply: DraftReply) -> bytes:
        """The bytes that are sent instead of a valid reply."""
        changed = self._fault.reply(reply) if self._num_proposals > 1 else reply
        data: bytes = changed if isinstance(changed, bytes) else msgpack.packb(changed)
        return data

    def release(self, slots: Sequence[int]) -> None:
        pass


class Fault(NamedTuple):
    """A fault while drafting, or in the reply."""

    kind: str
    draft: Callable[[BrokenDrafter], None] = lambda drafter: None  # noqa: ARG005
    reply: Callable[[DraftReply], DraftReply | bytes] = lambda reply: reply


def die(drafter: BrokenDrafter) -> None:  # noqa: ARG001
    raise ChannelClosedError("as if the process had been killed")


def fail(drafter: BrokenDrafter) -> None:  # noqa: ARG001
    raise DraftFaultError(DraftFault.NOT_A_NUMBER)


def stall(drafter: BrokenDrafter) -> None:
    assert drafter.noticed.wait(30)


def each(tokens: Any, parents: Any) -> Callable[[DraftReply], DraftReply]:
    """A reply with this tree for every request."""
    return lambda valid: valid._replace(trees=[TreeLists(tokens, parents)] * len(valid.trees))


FAULTS: dict[str, Fault] = {
    "dead": Fault("gone", draft=die),
    "own-fault": Fault("nan", draft=fail),
    "late": Fault("late", draft=stall),
    "frozen": Fault("frozen", draft=stall),
    "token-outside-vocabulary": Fault("nonsense", reply=each([5, 64], [NONE, 0])),
    "negative-token": Fault("nonsense", reply=each([5, -5], [NONE, 0])),
    "parent-after-child": Fault("nonsense", reply=each([5, 3, 4], [NONE, 2, 0])),
    "own-parent": Fault("nonsense", reply=each([5, 3], [NONE, 1])),
    "root-with-a-parent": Fault("nonsense", reply=each([5, 3], [0, 0])),
    "missing-parent": Fault("nonsense", reply=each([5, 3], [NONE])),
    "tree-too-big": Fault("nonsense", reply=each([5, 3, 4, 5, 6], [NONE, 0, 0, 0, 0])),
    "huge-token": Fault("nonsense", reply=each([5, 2**64 - 1], [NONE, 0])),
    "huge-parent": Fault("nonsense", reply=each([5, 3], [NONE, -(2**63)])),
    "no-root": Fault("nonsense", reply=each([], [])),
    "half-an-integer": Fault("nonsense", reply=each([5, 3.5], [NONE, 0])),
    "truth-as-a-parent": Fault("nonsense", reply=each([5, 3], [NONE, False])),
    "missing-tree": Fault("nonsense", reply=lambda reply: reply._replace(trees=reply.trees[:-1])),
    "one-list": Fault("nonsense", reply=lambda reply: reply._replace(trees=[5, 3])),  # type: ignore[list-item]
    "no-lists": Fault("nonsense", reply=each(5, NONE)),
    "no-trees": Fault("nonsense", reply=lambda reply: reply._replace(trees=b"")),  # type: ignore[arg-type]
    "no-scores": Fault("nonsense", reply=lambda reply: reply._replace(scores=[["high"]] * len(reply.trees))),  # type: ignore[list-item]
    "other-number": Fault("nonsense", reply=lambda reply: reply._replace(number=reply.number + 1)),
    "unknown-fault": Fault("nonsense", reply=lambda reply: reply._replace(fault="unknown")),  # type: ignore[arg-type]
    "fault-of-the-target": Fault("nonsense", reply=lambda reply: DraftReply.failed(reply.number, 0.1, DraftFault.LATE)),
    "nothing": Fault("nonsense", reply=lambda _: msgpack.packb(None)),
    "noise": Fault("nonsense", reply=lambda _: bytes([0xC1, 0xFF])),
}
# For faults without a reply: the timeout after which the target continues.
SHORT_TIMEOUTS = {"late": {"LEAST_WAIT_S": 0.02}, "frozen": {"LEAST_WAIT_S": 0.02, "FROZEN_S": 0.02}}


def set_timeouts(monkeypatch: pytest.MonkeyPatch, changes: dict[str, float] | None = None) -> None:
    for name, seconds in (TIMEOUTS | (changes or {})).items():
        monkeypatch.setattr(source, name, seconds)


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_drafter_does_not_change_the_output(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    with make_llm(toy, page_size=4) as llm:
        expected = [visible(choice) for choice in run(llm)]
    speculative = METHODS["NGRAM"](toy, tmp_path)
    with make_llm(toy, speculative=speculative, page_size=4) as llm:
        colocated = Colocated(llm, tmp_path)
        for _ in range(NUM_INJECTIONS):
            drafter = BrokenDrafter(fault, lambda: set_timeouts(monkeypatch, SHORT_TIMEOUTS.get(fault.kind)))
            monkeypatch.setattr(server, "pack", drafter.pack)
            colocated.start(drafter)
            with colocated.each_fault(lambda: set_timeouts(monkeypatch), drafter.noticed.set):
                assert [visible(choice) for choice in run(llm)] == expected
        faults = faults_of(llm)
        monkeypatch.setattr(server, "pack", wire.pack)
        colocated.start()  # replaced by one that works
        again = [visible(choice) for choice in run(llm)]
        faults_after = faults_of(llm)
        num_drafts = llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"]
        colocated.close()
    assert again == expected
    assert faults == faults_after == {fault.kind: NUM_INJECTIONS}
    assert num_drafts > 10


def test_a_late_drafter_is_used_again(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(drafter: BrokenDrafter) -> None:
        time.sleep(0.05)  # longer than the host takes between two steps
        stall(drafter)

    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path)
        drafter = BrokenDrafter(Fault("late", draft=slow), lambda: set_timeouts(monkeypatch, SHORT_TIMEOUTS["late"]))
        colocated.start(drafter)
        with colocated.each_fault(lambda: set_timeouts(monkeypatch), drafter.noticed.set):
            llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
        colocated.close()
        assert faults_of(llm) == {"late": 1}


@pytest.mark.parametrize("uses_cuda_ipc", [False, True], ids=["socket", "memory"])
def test_a_drafter_that_is_slower_than_plain_steps_is_used_again(
    uses_cuda_ipc: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would have orders of steps that are over for ever."""

    def slow(drafter: BrokenDrafter) -> None:
        if drafter._num_proposals == 2:
            wait_until(lambda: colocated.drafts._peer is None or colocated.drafts._peer.is_late, 60.0)
            time.sleep(0.05)  # some plain steps
        time.sleep(0.01)

    set_timeouts(monkeypatch, {"LEAST_WAIT_S": 0.5})
    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc)
        colocated.start(BrokenDrafter(Fault("late", draft=slow), lambda: None))
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=230, ignore_eos=True))
        assert faults_of(llm).keys() == {"late"}
        assert llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 20
        colocated.close()


def test_a_drafter_that_replied_during_a_long_step_is_not_frozen(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory the host does not wait for replies, so they lie in the socket."""
    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc=True)
        colocated.start()
        drafts = colocated.drafts
        submit = drafts.submit

        def submit_late(context: ProposeContext) -> None:
            if (peer := drafts._peer) is not None and peer._unanswered:
                assert peer._channel.poll(30.0)
                set_timeouts(monkeypatch, {"FROZEN_S": 0.0})
            submit(context)
            set_timeouts(monkeypatch)

        monkeypatch.setattr(drafts, "submit", submit_late)
        run(llm)
        assert faults_of(llm) == {}
        assert drafts._peer is not None
        colocated.close()


def test_a_step_that_no_tree_is_for_is_plain(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though trees in memory have bounds alone: in graphs it has the smallest size, and the next step may follow it."""
    sizes: list[tuple[int, set[int]]] = []  # (depth, most nodes) of each step

    def skip_some(peer: Any, context: ProposeContext) -> None:
        if len(sizes) % 4 == 3:
            peer._awaited = None
            peer._encoder.skip(context)
        else:
            submit(peer, context)

    submit = source._Peer.submit
    monkeypatch.setattr(source._Peer, "submit", skip_some)
    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc=True)
        colocated.start()
        take, drafts = colocated.drafts.take_unsized, colocated.drafts

        def record(*arguments: Any) -> UnsizedTrees | None:
            unsized = take(*arguments)
            assert unsized is not None
            sizes.append((unsized.tree.max_depth, set(unsized.most_nodes)))
            return unsized

        monkeypatch.setattr(drafts, "take_unsized", record)
        llm.generate(PROMPTS[4:], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        with_drafts = [place for place, (depth, _) in enumerate(sizes) if depth]
        assert len(with_drafts) > 4
        assert all(place % 4 != 3 for place in with_drafts)
        assert all(most == {1} for depth, most in sizes if not depth)
        slots = torch.tensor([0])
        drafts._on_device.put(slots, DraftTree.from_lists([TreeLists([7, 8], [NONE, 0])]))
        drafts._waiting.add(0)
        for limit in (DraftLimit(0, 0), DraftLimit(5, 5)):  # what a step could not use is no longer there
            _, num_nodes = drafts.collect(TreeRows(slots, torch.tensor([7]), [(0, 7)]), [limit])
            assert num_nodes == [1]
        assert sizes[-2] == (0, {1})
        colocated.close()


# In memory that both share: the drafter that breaks, and what the target notices.
IN_MEMORY = {
    "dead": {"gone"},  # the device may have begun to wait before
    "own-fault": {"nan"},
    "late": {"late"},
    "frozen": {"frozen"},
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_drafter_that_breaks_beside_its_memory_does_not_change_the_output(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    with make_llm(toy, page_size=4) as llm:
        expected = [visible(choice) for choice in run(llm)]
    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc=True)
        short = {"LEAST_WAIT_S": 0.02} | SHORT_TIMEOUTS.get(fault.kind, {})
        drafter = BrokenDrafter(fault, lambda: set_timeouts(monkeypatch, short))
        colocated.start(drafter)
        with colocated.each_fault(lambda: set_timeouts(monkeypatch), drafter.noticed.set):
            assert [visible(choice) for choice in run(llm)] == expected
        faults = faults_of(llm)
        colocated.start()  # replaced by one that works
        before = llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"]
        assert [visible(choice) for choice in run(llm)] == expected
        assert llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > before + 10
        assert faults_of(llm) == faults
        colocated.close()
    assert faults.keys() - {"late"} or fault.kind == "late"
    assert faults.keys() >= IN_MEMORY[name]


class InvalidTreesDrafter(BrokenDrafter):
    """Its trees have a wrong root, a token outside of the vocabulary, or a parent behind its child."""

    lies = (([99, 3, 4], [NONE, 0, 1]), ([None, 3, 64], [NONE, 0, 1]), ([None, 3, 4], [NONE, 2, 0]))

    def propose(self, context: ProposeContext) -> DraftTree:
        tree = super().propose(context)
        for row, root in enumerate(context.roots().tolist()):
            tokens, parents = self.lies[(self._num_proposals + row) % len(self.lies)]
            tree.tokens[row] = torch.tensor([root if token is None else token for token in tokens])
            tree.parents[row] = torch.tensor(parents)
        return tree


def test_invalid_trees_in_memory_are_not_verified(toy: Path, tmp_path: Path) -> None:
    with make_llm(toy, page_size=4) as llm:
        expected = [visible(choice) for choice in run(llm)]
    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        colocated = Colocated(llm, tmp_path, uses_cuda_ipc=True)
        drafter = InvalidTreesDrafter(Fault("lies"), lambda: None)
        colocated.start(drafter)
        assert [visible(choice) for choice in run(llm)] == expected
        assert drafter._num_proposals > 10
        assert llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"] == 0
        assert faults_of(llm) == {}
        colocated.close()
