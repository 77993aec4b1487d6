"""A drafter outside the target's process drafts the trees it drafts inside, and whatever it does, the text stays."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specray.channel import ChannelClosedError
from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import DraftFaultError, ProposeContext
from specray.step import DraftFault, StepPlan, StepResult
from specray.worker.remote_drafter import source
from tests.support.colocated import Colocated, Recorded, worker_of
from tests.support.engine import make_llm, visible
from tests.support.methods import METHODS, Make

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
PROMPTS = [[*PREFIX, 40, 41, 42], [*PREFIX, 50, 41], [*PREFIX[:8], 33], [5], [0, 2, 4, 2, 4, 2, 4]]
RUNS: dict[str, dict[str, Any]] = {
    "warm-cache": {"page_size": 4},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "preemption": {"page_size": 4, "max_total_tokens": 60},
}


# Broken drafters of each kind; SPECRAY_INJECTIONS=100 takes a few minutes.
NUM_INJECTIONS = int(os.environ.get("SPECRAY_INJECTIONS", "3"))
PATIENCE = {"LEAST_WAIT_S": 60.0, "FIRST_WAIT_S": 60.0, "FROZEN_S": 60.0}  # a busy machine makes nobody late here


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    set_patience(monkeypatch)


def run(llm: LLM) -> list[Completion]:
    params = [
        SamplingParams(temperature=[0.0, 1.0, 4.0][i % 3], seed=i, max_tokens=12, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [generation.choices[0] for _ in range(2) for generation in llm.generate(PROMPTS, params)]


def faults_of(llm: LLM) -> dict[str, float]:
    counts = llm.engine.stats.labelled["specray_draft_faults_total"]
    return {kind: count for kind, count in counts.items() if count}


def recorded(llm: LLM) -> Recorded:
    worker = worker_of(llm)
    worker._drafts = record = Recorded(worker._drafts)  # type: ignore[assignment]
    return record


@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("method", METHODS)
def test_the_trees_are_those_of_the_inline_drafter(method: str, options: str, toy: Path, tmp_path: Path) -> None:
    make: Make = METHODS[method]
    speculative = make(toy, tmp_path)
    with make_llm(toy, speculative=speculative, **RUNS[options]) as llm:
        inline = recorded(llm)
        expected = run(llm)
    with make_llm(toy, speculative=speculative, **RUNS[options]) as llm:
        far = Colocated(llm, tmp_path)
        far.start()
        record = recorded(llm)
        choices = run(llm)
        far.close()
    assert [visible(choice) for choice in choices] == [visible(choice) for choice in expected]
    assert record.trees == inline.trees
    assert sum(len(tree.tokens) > 1 for step in inline.trees for tree in step) > 5  # type: ignore[attr-defined]
    assert record.take_faults() == []  # type: ignore[operator]


@pytest.mark.parametrize("options", RUNS)
def test_drafters_are_switched_between_steps_and_no_text_shows_it(
    options: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layers' features, larger trees, another use of the prefix cache, nobody at all: each amid every request."""
    with make_llm(toy, **RUNS[options]) as llm:
        expected = [visible(choice) for choice in run(llm)]
    names = ["NGRAM-short", "EAGLE3", None, "EAGLE-map", "NGRAM", None, "EAGLE3-wide"]
    made = {name: METHODS[name](toy, tmp_path / name) for name in names if name}
    with make_llm(toy, speculative=made["EAGLE3-wide"], **RUNS[options]) as llm:
        far = Colocated(llm, tmp_path)
        worker, sizes = worker_of(llm), set()
        execute = worker.execute

        def switching(plan: StepPlan) -> StepResult:
            name = names[plan.step_id // 2 % len(names)]
            if plan.step_id % 2 == 0:
                far.start(speculative=made[name]) if name else far.dismiss()
            result = execute(plan)
            sizes.add((worker._drafts.max_draft_tokens, worker._drafts.aux_hidden_state_layers))
            return result

        monkeypatch.setattr(worker, "execute", switching)
        choices = [visible(choice) for choice in run(llm)]
        assert choices == expected
        assert faults_of(llm) == {}
        assert llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"] > 50
        assert len(sizes) == len(set(names))  # nobody has a size, too
        far.close()


class Broken:
    """A drafter that does one thing wrong in every order from its second on; `stall` does so once."""

    max_draft_tokens = 3
    aux_hidden_state_layers = (0, 1)
    reads_next_token = False

    def __init__(self, fault: "Fault", about_to: Callable[[], object]) -> None:
        self.noticed = threading.Event()
        self._fault = fault
        self._about_to = about_to  # called before the first wrong answer
        self._num_orders = 0

    def propose(self, context: ProposeContext) -> DraftTree:
        self._num_orders += 1
        roots = [row.token_ids[row.end] for row in context.rows]
        assert context.aux_hidden_states is not None
        assert context.aux_hidden_states.shape[1] == 2 * 32
        if self._num_orders > 1:
            return Unchecked(self._fault(self, roots))  # type: ignore[return-value]
        self._about_to()
        return DraftTree.of([RowTree([root, 3, 4], [NONE, 0, 1]) for root in roots])

    def release(self, slots: Sequence[int]) -> None:
        pass


class Unchecked:
    """Rows as a broken drafter sends them, which no tensor could hold."""

    def __init__(self, trees: list[RowTree]) -> None:
        self._trees = trees

    def rows(self) -> list[RowTree]:
        return self._trees


Fault = Callable[[Broken, Sequence[int]], list[Any]]


def die(*_: object) -> list[RowTree]:
    raise ChannelClosedError("as if the process had been killed")


def fail(*_: object) -> list[RowTree]:
    raise DraftFaultError(DraftFault.NOT_A_NUMBER)


def stall(drafter: Broken, roots: Sequence[int]) -> list[RowTree]:
    assert drafter.noticed.wait(30)
    return [RowTree([root, 3], [NONE, 0]) for root in roots]


def each(tree: Callable[[int], object]) -> Fault:
    return lambda _, roots: [tree(root) for root in roots]


FAULTS: dict[str, tuple[str, Fault]] = {
    "dead": ("gone", die),
    "own-fault": ("nan", fail),
    "late": ("late", stall),
    "frozen": ("frozen", stall),
    "foreign-token": ("nonsense", each(lambda root: RowTree([root, 64], [NONE, 0]))),
    "negative-token": ("nonsense", each(lambda root: RowTree([root, -5], [NONE, 0]))),
    "no-integer": ("nonsense", each(lambda root: RowTree([root, 2.5], [NONE, 0]))),  # type: ignore[list-item]
    "parent-after-child": ("nonsense", each(lambda root: RowTree([root, 3, 4], [NONE, 2, 0]))),
    "own-parent": ("nonsense", each(lambda root: RowTree([root, 3], [NONE, 1]))),
    "missing-parent": ("nonsense", each(lambda root: RowTree([root, 3], [NONE]))),
    "tree-too-big": ("nonsense", each(lambda root: RowTree([root, 3, 4, 5, 6], [NONE, 0, 0, 0, 0]))),
    "no-root": ("nonsense", each(lambda _: RowTree([], []))),
    "missing-tree": ("nonsense", lambda _, roots: [RowTree([root], [NONE]) for root in roots][1:]),
    "no-tree-at-all": ("nonsense", each(lambda _: "tree")),
    "nothing": ("nonsense", each(lambda _: None)),
}
# What the target's patience is set to for the answer that does not come; it is endless for all others.
IMPATIENCE = {"late": {"LEAST_WAIT_S": 0.02}, "frozen": {"LEAST_WAIT_S": 0.02, "FROZEN_S": 0.02}}


def set_patience(monkeypatch: pytest.MonkeyPatch, changes: dict[str, float] | None = None) -> None:
    for name, seconds in (PATIENCE | (changes or {})).items():
        monkeypatch.setattr(source, name, seconds)


@pytest.mark.parametrize("name", FAULTS)
def test_broken_drafters_cost_their_trees_only(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fault = FAULTS[name]
    with make_llm(toy, page_size=4) as llm:
        expected = [visible(choice) for choice in run(llm)]
    speculative = METHODS["NGRAM"](toy, tmp_path)
    with make_llm(toy, speculative=speculative, page_size=4) as llm:
        far = Colocated(llm, tmp_path)
        for _ in range(NUM_INJECTIONS):
            drafter = Broken(fault, lambda: set_patience(monkeypatch, IMPATIENCE.get(kind)))
            far.start(drafter)
            with far.each_fault(lambda: set_patience(monkeypatch), drafter.noticed.set):
                assert [visible(choice) for choice in run(llm)] == expected
        faults = faults_of(llm)
        far.start()  # a sound one takes its place
        again = [visible(choice) for choice in run(llm)]
        faults_after = faults_of(llm)
        num_drafts = llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"]
        far.close()
    assert again == expected
    assert faults == faults_after == {kind: NUM_INJECTIONS}
    assert num_drafts > 10


def test_a_drafter_that_was_late_once_is_waited_for_again(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(drafter: Broken, roots: Sequence[int]) -> list[RowTree]:
        time.sleep(0.05)  # more than the host takes for itself between two steps
        return stall(drafter, roots)

    with make_llm(toy, speculative=METHODS["NGRAM"](toy, tmp_path), page_size=4) as llm:
        far = Colocated(llm, tmp_path)
        drafter = Broken(slow, lambda: set_patience(monkeypatch, IMPATIENCE["late"]))
        far.start(drafter)
        with far.each_fault(lambda: set_patience(monkeypatch), drafter.noticed.set):
            llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
        far.close()
        assert faults_of(llm) == {"late": 1}
