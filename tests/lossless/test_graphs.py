"""Decode steps in CUDA graphs have the same output as without, in every bucket, on the stand-in for graphs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from specray.engine.engine_request import EngineRequest
from specray.outputs import Completion
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import UnsizedTrees
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.step import UNLIMITED, DraftLimit, StepPlan
from specray.testing.conformance import GREEDY, PROMPTS, SAMPLED, require_equal
from specray.worker.buckets import Bucket
from specray.worker.remote_drafter import source
from tests.support.colocated import Colocated, worker_of
from tests.support.decoders import write_decoder
from tests.support.engine import generate, make_llm
from tests.support.graph_cases import NAMES, plain_output, require_plain_output
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs
from tests.support.methods import METHODS, eagle, several
from tests.support.processes import wait_until

LEAST_SCORE = 0.1  # of random heads
HALF = slice(0, None, 2)  # of the prompts, short and long ones
# With two plans in flight the limits of the last trees are looser by what the first one may still accept.
ONE_PLAN = {"disable_overlap_schedule": True}


def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a drafter of another process on a busy machine."""
    for wait in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, wait, 60.0)


@pytest.fixture
def graphs() -> Iterator[list[RecordedGraphs]]:
    with recorded_graphs() as graphs:
        yield graphs


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[list[Completion]]:
    return plain_output(toy)


@pytest.mark.parametrize("name", NAMES)
def test_output_does_not_depend_on_graphs(
    name: str | None, toy: Path, tmp_path: Path, plain: list[list[Completion]], graphs: list[RecordedGraphs]
) -> None:
    # With one plan in flight every request's last trees become smaller, and with them the buckets. Graphs of a drafter
    # know nothing of sampling but the temperature, which is in each bucket.
    with_options = name in (None, "EAGLE3", "NGRAM")
    require_plain_output(name, toy, tmp_path, plain, with_options, disable_overlap_schedule=True)
    [recorded] = graphs
    assert recorded.replayed
    never = recorded.captured - recorded.replayed
    assert not never or name in ("NGRAM", "SEVERAL"), never  # n-grams that match are rare


def test_output_with_kv_in_float8_does_not_depend_on_graphs(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    plain = plain_output(toy, kv_cache_dtype="fp8_e5m2")
    require_plain_output("EAGLE3", toy, tmp_path, plain, kv_cache_dtype="fp8_e5m2", disable_overlap_schedule=True)
    assert graphs[-1].replayed


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "qwen3_5", "lfm2"])
def test_output_of_transformers_modules_does_not_depend_on_graphs(
    name: str, tmp_path: Path, graphs: list[RecordedGraphs]
) -> None:
    """Windows, softcaps, shared KV and states. The head reads hidden states by hooks on the modules."""
    write_decoder(name, tmp_path)
    options = {"model_impl": "transformers", "disable_overlap_schedule": True}
    plain = plain_output(tmp_path, **options)
    require_plain_output("EAGLE3", tmp_path, tmp_path, plain, **options)
    assert {kind for kind, *_ in graphs[-1].replayed} == {"forward", "verify", "draft"}


@pytest.mark.parametrize(
    "name", ["EAGLE3", "EAGLE-map", "MTP-stack", "STANDALONE-tree", "EAGLE3-merged", "PARALLEL", "PARALLEL-one-level"]
)
def test_drafts_do_not_depend_on_graphs(name: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs]) -> None:
    """As many of them are accepted, at every depth."""
    usages = []
    for disabled in (True, False):
        make = METHODS.get(name) or eagle(3, shape=(1, 3, 4), is_parallel=True)
        options = {"speculative": make(toy, tmp_path), "disable_cuda_graph": disabled, **ONE_PLAN}
        choices = generate(toy, PROMPTS[HALF], GREEDY[HALF], max_running_requests=3, **options)
        usages.append([choice.usage for choice in choices])
    assert usages[0] == usages[1]  # merged trees, too: what they have learned has no part of the warm-up's texts
    has_drafts = any(kind == "draft" for kind, *_ in graphs[0].replayed)
    assert has_drafts != (name == "EAGLE3-merged")  # where the host merges trees, it drafts


def test_scores_of_trees_cut_the_same_drafts_in_graphs(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's probabilities, by which `budget: auto` chooses what is verified."""

    def cut(is_eager: bool) -> tuple[list[list[float]], list[int]]:
        """The scores of all trees, and their numbers of nodes without those of low scores."""
        options = {"speculative": METHODS["EAGLE3"](toy, tmp_path), "disable_cuda_graph": is_eager, **ONE_PLAN}
        scores: list[list[float]] = []
        sizes: list[int] = []
        with make_llm(toy, max_running_requests=3, **options) as llm:
            worker = worker_of(llm)
            drafts = worker.drafts
            assert isinstance(drafts, InlineDrafts)
            begin, take = worker.begin, drafts._pending.take

            def begin_likely(plan: StepPlan) -> None:
                limits = [row.draft_limit._replace(min_score=LEAST_SCORE) for row in plan.rows]
                rows = [row._replace(draft_limit=limit) for row, limit in zip(plan.rows, limits, strict=True)]
                begin(plan._replace(rows=rows))

            def counted(slots: Tensor, roots: Tensor, limits: Sequence[DraftLimit]) -> UnsizedTrees:
                taken = take(slots, roots, limits)

                def wait() -> tuple[DraftTree, list[int]]:
                    found = taken.wait_for_sizes()
                    scores.extend(filter(None, drafts.scores))  # a request without a tree has none
                    sizes.extend(found[1])
                    return found

                return taken._replace(wait_for_sizes=wait)

            monkeypatch.setattr(worker, "begin", begin_likely)
            monkeypatch.setattr(drafts._pending, "take", counted)
            llm.generate(PROMPTS, GREEDY)
        return scores, sizes

    (eager_scores, eager_sizes), (scores, sizes) = cut(is_eager=True), cut(is_eager=False)
    assert sum(map(len, eager_scores)) > sum(size - 1 for size in eager_sizes) > 100  # some are cut, and some are not
    assert sizes == eager_sizes
    assert scores == [pytest.approx(row, rel=1e-4) for row in eager_scores]
    assert any(kind == "draft" for kind, *_ in graphs[0].replayed)


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_each_of_several_drafters_drafts_in_its_own_graphs(
    placement: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a step name different drafters. As many drafts are accepted as without graphs, of each of them."""
    wait_long(monkeypatch)
    members = {name: METHODS[name] for name in ("EAGLE3", "STANDALONE-tree", "PARALLEL", "NGRAM")}
    counts = []
    for disabled in (True, False):
        options = {"speculative": several(**members)(toy, tmp_path), "disable_cuda_graph": disabled, **ONE_PLAN}
        with make_llm(toy, max_running_requests=4, **options) as llm:
            colocated = Colocated(llm, tmp_path) if placement == "colocated" else None
            if colocated is not None:
                colocated.start()
            names = list(members)
            for place, (prompt, params) in enumerate(zip(PROMPTS, SAMPLED, strict=True)):
                llm.engine.add_request(EngineRequest(f"r{place}", prompt, params, drafter=names[place % len(names)]))
            while llm.engine.has_work:
                llm.engine.step()
            seen = llm.engine.stats.labelled
            counts.append([seen[f"specray_drafter_{what}_tokens_total"] for what in ("draft", "accepted")])
            if colocated is not None:
                colocated.close()
                (tmp_path / "drafts").unlink()
    assert counts[0] == counts[1]
    assert {key[-1] for key in graphs[-1].replayed if key[0] == "draft"} == set(members) - {"NGRAM"}  # type: ignore[index]


@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE-tree", "MTP-stack"])
def test_a_drafter_of_another_process_drafts_in_graphs(
    name: str, toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of them are accepted as of those without graphs."""
    wait_long(monkeypatch)
    found = []
    for disabled in (True, False):
        options = {"speculative": METHODS[name](toy, tmp_path), "disable_cuda_graph": disabled, **ONE_PLAN}
        with make_llm(toy, max_running_requests=3, **options) as llm:
            colocated = Colocated(llm, tmp_path)
            colocated.start()
            found.append([each.choices[0] for each in llm.generate(PROMPTS[HALF], SAMPLED[HALF])])
            colocated.close()
            (tmp_path / "drafts").unlink()
    require_equal(found[1], found[0])
    assert [choice.usage for choice in found[0]] == [choice.usage for choice in found[1]]
    assert {kind for kind, *_ in graphs[1].replayed} == {"draft"}


def test_a_drafter_of_another_process_runs_as_many_levels_as_limits_allow(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of seven of which three are wanted, then all."""
    wait_long(monkeypatch)
    prompts = [[0, *range(5, 35)]]  # longer than a tree, so that no graph reads it
    plain = generate(toy, prompts, SAMPLED[:1], disable_cuda_graph=True)
    options = {"speculative": eagle(3, shape=(7, 1, 8))(toy, tmp_path), **ONE_PLAN}
    with make_llm(toy, max_running_requests=1, **options) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        recorded = graphs[-1]

        def drafted() -> set[int]:
            return {key[1].nodes for key in recorded.replayed if key[0] == "draft"}  # type: ignore[index]

        recorded.replayed.clear()  # of the warm-up
        for limit, nodes in ((DraftLimit(3, 3), 4), (UNLIMITED, 8)):
            assert nodes not in drafted()
            found = llm.generate(prompts, SAMPLED[:1], draft_limits=[limit])
            require_equal([each.choices[0] for each in found], plain)
            wait_until(lambda: nodes in drafted())  # noqa: B023
        colocated.close()
    few, many = (recorded.num_launches(("draft", Bucket(1, nodes, nodes), False, "")) for nodes in (4, 8))
    assert few < 0.6 * many


def test_steps_of_more_requests_than_cuda_graph_max_bs_have_no_graph(toy: Path, graphs: list[RecordedGraphs]) -> None:
    plain = generate(toy, PROMPTS, GREEDY, disable_cuda_graph=True)
    assert not graphs
    require_equal(generate(toy, PROMPTS, GREEDY, max_running_requests=8, cuda_graph_max_bs=2), plain)
    [recorded] = graphs
    assert {bucket.rows for _, bucket, *_ in recorded.captured} == {1, 2}
    assert recorded.replayed


def test_limits_may_allow_larger_trees_than_there_is_a_bucket_for(
    toy: Path, tmp_path: Path, graphs: list[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with 129 requests and trees of 8 nodes: by their depth they have 4, and so many a graph drafts."""
    prompts, params = PROMPTS[:3], SAMPLED[:3]
    plain = generate(toy, prompts, params, disable_cuda_graph=True)
    monkeypatch.setattr("specray.worker.buckets.MAX_TOKENS", 3 * 4)
    with make_llm(toy, max_running_requests=3, speculative=eagle(3, shape=(7, 1, 8))(toy, tmp_path)) as llm:
        found = llm.generate(prompts, params, draft_limits=[DraftLimit(7, 3)] * 3)
    require_equal([each.choices[0] for each in found], plain)
    drafted = {key[1] for key in graphs[-1].replayed if key[0] == "draft"}  # type: ignore[index]
    assert Bucket(3, 3 * 4, 4) in drafted
