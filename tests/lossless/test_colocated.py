"""A drafter outside the target's process drafts the trees it drafts inside, and whatever it does, the text stays."""

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
from specray.step import DraftFault
from specray.worker import colocated
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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a drafter late here."""
    monkeypatch.setattr(colocated, "LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(colocated, "FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(colocated, "FROZEN_S", 60.0)


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


class Broken:
    """A drafter that does one thing wrong from its second order on."""

    max_draft_tokens = 3
    feature_layers = (0, 1)
    reads_next_token = False

    def __init__(self, fault: Callable[[Sequence[int]], list[RowTree]]) -> None:
        self._fault = fault
        self._num_orders = 0

    def propose(self, context: ProposeContext) -> DraftTree:
        self._num_orders += 1
        roots = [row.token_ids[row.end] for row in context.rows]
        assert context.features is not None
        assert context.features.shape[1] == 2 * 32
        if self._num_orders > 1:
            return Unchecked(self._fault(roots))  # type: ignore[return-value]
        return DraftTree.of([RowTree([root, 3, 4], [NONE, 0, 1]) for root in roots])

    def release(self, slots: Sequence[int]) -> None:
        pass


class Unchecked:
    """Rows as a broken drafter sends them, which no tensor could hold."""

    def __init__(self, trees: list[RowTree]) -> None:
        self._trees = trees

    def rows(self) -> list[RowTree]:
        return self._trees


def die(_: Sequence[int]) -> list[RowTree]:
    raise ChannelClosedError("as if the process had been killed")


def fail(_: Sequence[int]) -> list[RowTree]:
    raise DraftFaultError(DraftFault.NOT_A_NUMBER)


def sleep(seconds: float) -> Callable[[Sequence[int]], list[RowTree]]:
    def drafts(roots: Sequence[int]) -> list[RowTree]:
        time.sleep(seconds)
        return [RowTree([root, 3], [NONE, 0]) for root in roots]

    return drafts


def each(tree: Callable[[int], object]) -> Callable[[Sequence[int]], list[Any]]:
    return lambda roots: [tree(root) for root in roots]


FAULTS: dict[str, tuple[str, Callable[[Sequence[int]], list[Any]]]] = {
    "dead": ("gone", die),
    "own-fault": ("nan", fail),
    "late": ("late", sleep(0.05)),
    "frozen": ("frozen", sleep(1.0)),
    "foreign-token": ("nonsense", each(lambda root: RowTree([root, 64], [NONE, 0]))),
    "negative-token": ("nonsense", each(lambda root: RowTree([root, -5], [NONE, 0]))),
    "no-integer": ("nonsense", each(lambda root: RowTree([root, 2.5], [NONE, 0]))),  # type: ignore[list-item]
    "parent-after-child": ("nonsense", each(lambda root: RowTree([root, 3, 4], [NONE, 2, 0]))),
    "own-parent": ("nonsense", each(lambda root: RowTree([root, 3], [NONE, 1]))),
    "missing-parent": ("nonsense", each(lambda root: RowTree([root, 3], [NONE]))),
    "tree-too-big": ("nonsense", each(lambda root: RowTree([root, 3, 4, 5, 6], [NONE, 0, 0, 0, 0]))),
    "no-root": ("nonsense", each(lambda _: RowTree([], []))),
    "missing-tree": ("nonsense", lambda roots: [RowTree([root], [NONE]) for root in roots][1:]),
    "no-tree-at-all": ("nonsense", each(lambda _: "tree")),
    "nothing": ("nonsense", each(lambda _: None)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_drafter_costs_its_trees_only(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fault = FAULTS[name]
    if kind in ("late", "frozen"):
        monkeypatch.setattr(colocated, "LEAST_WAIT_S", 0.01)
        monkeypatch.setattr(colocated, "FROZEN_S", 0.05 if kind == "frozen" else 60.0)
    with make_llm(toy, page_size=4) as llm:
        expected = [visible(choice) for choice in run(llm)]
    speculative = METHODS["NGRAM"](toy, tmp_path)
    with make_llm(toy, speculative=speculative, page_size=4) as llm:
        far = Colocated(llm, tmp_path)
        far.start(Broken(fault))
        choices = [visible(choice) for choice in run(llm)]
        faults = faults_of(llm)
        far.start()  # a sound one takes its place
        again = [visible(choice) for choice in run(llm)]
        faults_after = faults_of(llm)
        num_drafts = llm.engine.stats.values["specray_spec_decode_num_draft_tokens_total"]
        far.close()
    assert choices == again == expected
    assert kind in faults
    assert set(faults) <= {kind, "late"}
    assert faults_after == faults
    assert num_drafts > 10
