"""Decode steps in CUDA graphs have the same output as without, in every bucket, on the stand-in for graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit
from specray.testing.conformance import GREEDY, PROMPTS, SAMPLED, require_equal
from specray.worker.remote_drafter import source
from tests.support.colocated import Colocated
from tests.support.engine import generate, make_llm
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs
from tests.support.methods import METHODS

DRAFTS = ["EAGLE3", "EAGLE3-chain", "EAGLE-map", "MTP", "MTP-stack", "STANDALONE", "STANDALONE-tree"]
NAMES = [None, *DRAFTS, "NGRAM", "SEVERAL"]
# For each number of nodes of a tree: greedy and sampled requests, the last of which run by two and alone at the end.
LIMITS = [UNLIMITED, DraftLimit(3, 9), DraftLimit(0, 0)]
LENGTHS = [4, 4, 6, 12, 20]
PARAMS = [
    [SamplingParams(temperature=heat, top_p=0.9, seed=i, max_tokens=m, ignore_eos=True) for i, m in enumerate(LENGTHS)]
    for heat in (0.0, 0.8)
]


@pytest.fixture
def graphs() -> Iterator[list[RecordedGraphs]]:
    with recorded_graphs() as graphs:
        yield graphs


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[list[Completion]]:
    """Without graphs and drafts, one request at a time: outputs for SAMPLED, then for PARAMS."""
    return [generate(toy, PROMPTS[: len(params)], params, max_running_requests=1) for params in (SAMPLED, *PARAMS)]


@pytest.mark.parametrize("name", NAMES)
def test_output_does_not_depend_on_graphs(
    name: str | None, toy: Path, tmp_path: Path, plain: list[list[Completion]], graphs: list[RecordedGraphs]
) -> None:
    options = {} if name is None else {"speculative": METHODS[name](toy, tmp_path)}
    with make_llm(toy, max_running_requests=3, **options) as llm:
        require_equal([each.choices[0] for each in llm.generate(PROMPTS, SAMPLED)], plain[0])
        for limit in LIMITS if options else [UNLIMITED]:
            for params, expected in zip(PARAMS, plain[1:], strict=True):
                limits = [limit] * len(params)
                seen = llm.generate(PROMPTS[: len(params)], params, draft_limits=limits)
                require_equal([each.choices[0] for each in seen], expected)
    [recorded] = graphs
    assert recorded.replayed
    never = recorded.captured - recorded.replayed
    assert not never or name in ("NGRAM", "SEVERAL"), never  # n-grams that match are rare


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE-map", "MTP-stack", "STANDALONE-tree", "EAGLE3-ngram"])
def test_drafts_do_not_depend_on_graphs(name: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]) -> None:
    """As many of them are accepted, at every depth."""
    usages = []
    for disabled in (True, False):
        options = {"speculative": METHODS[name](toy, tmp_path), "disable_cuda_graph": disabled}
        choices = generate(toy, PROMPTS, GREEDY, max_running_requests=3, **options)
        usages.append([choice.usage for choice in choices])
    assert usages[0] == usages[1]
    assert any(kind == "draft" for kind, *_ in graphs[0].replayed)


@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE-tree", "MTP-stack"])
def test_a_drafter_of_another_process_drafts_in_graphs(
    name: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of them are accepted as of those without graphs."""
    for wait in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 60.0)  # long enough for a busy machine
    found = []
    for disabled in (True, False):
        options = {"speculative": METHODS[name](toy, tmp_path), "disable_cuda_graph": disabled}
        with make_llm(toy, max_running_requests=3, **options) as llm:
            colocated = Colocated(llm, tmp_path)
            colocated.start()
            found.append([each.choices[0] for each in llm.generate(PROMPTS, SAMPLED)])
            colocated.close()
            (tmp_path / "drafts").unlink()
    require_equal(found[1], found[0])
    assert [choice.usage for choice in found[0]] == [choice.usage for choice in found[1]]
    assert {kind for kind, *_ in graphs[1].replayed} == {"draft"}


def test_steps_of_more_requests_than_cuda_graph_max_bs_have_no_graph(toy: Path, graphs: list[RecordedGraphs]) -> None:
    plain = generate(toy, PROMPTS, GREEDY, disable_cuda_graph=True)
    assert not graphs
    require_equal(generate(toy, PROMPTS, GREEDY, max_running_requests=8, cuda_graph_max_bs=2), plain)
    [recorded] = graphs
    assert {bucket.rows for _, bucket, *_ in recorded.captured} == {1, 2}
    assert recorded.replayed
