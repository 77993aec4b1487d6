"""Several drafters on one target: the text is that of plain decoding, and a shadow measures what it would bring.

test_conformance runs the checks of all drafting methods with several drafters, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.engine.engine_request import EngineRequest
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, DraftReport, TargetView
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DrafterUse, DraftFault
from specray.testing.conformance import PROMPTS, SAMPLED
from tests.support.colocated import Colocated
from tests.support.engine import make_llm
from tests.support.methods import METHODS, several

COMPOSITIONS = [
    ("EAGLE3", "NGRAM"),
    ("EAGLE-map", "PARALLEL", "MTP-deepseek"),
    ("STANDALONE", "NGRAM-suffix", "EAGLE3-chain", "MTP-stack"),
]


def configured(names: Sequence[str], toy: Path, folder: Path) -> SpeculativeConfig:
    return several(**{name: METHODS[name] for name in names})(toy, folder)


def finish(llm: LLM, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """The output tokens of each request, and which drafter it had."""
    for request in requests:
        llm.engine.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens


def requests_for(names: Sequence[str]) -> list[EngineRequest]:
    """All prompts under a range of sampling options; the requests name the drafters in turn, and some none."""
    choices = ["", *names]
    return [
        EngineRequest(f"r{place}", prompt, params, drafter=choices[place % len(choices)])
        for place, (prompt, params) in enumerate(zip(PROMPTS, SAMPLED, strict=True))
    ]


@pytest.fixture(scope="module")
def plain(toy: Path) -> dict[str, list[int]]:
    with make_llm(toy, max_running_requests=1, disable_radix_cache=True) as llm:
        return finish(llm, requests_for([]))


@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_a_batch_with_mixed_drafters_generates_the_text_of_plain_decoding(
    names: Sequence[str], placement: str, toy: Path, tmp_path: Path, plain: dict[str, list[int]]
) -> None:
    speculative = configured(names, toy, tmp_path)
    with make_llm(toy, speculative=speculative, page_size=4, max_running_requests=6) as llm:
        remote = None
        if placement == "colocated":
            remote = Colocated(llm, tmp_path)
            remote.start()
        for _ in range(2):  # the second time from the prefix cache, which the drafters share
            assert finish(llm, requests_for(names)) == plain
        drafted = llm.engine.stats.labelled["specray_drafter_draft_tokens_total"]
        assert set(drafted) == set(names)
        assert all(drafted.values()), drafted
        seconds = llm.engine.stats.labelled["specray_drafter_seconds_total"]
        assert all(seconds[name] > 0 for name in names)
        if remote is not None:
            remote.close()


class NotFinite:
    """A drafter whose logits are not finite."""

    max_draft_tokens = 3
    aux_hidden_state_layers = ()
    reads_next_token = False

    def __init__(self, config: SpeculativeConfig, target: TargetView) -> None:
        """As drafters that are named by their import path."""

    def propose(self, context: ProposeContext) -> DraftTree:
        roots = context.roots()
        return DraftTree.roots(roots)._replace(num_nodes=torch.zeros_like(roots))

    def release(self, slots: Sequence[int]) -> None:
        """It has no state."""


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_a_drafter_whose_logits_are_not_finite_does_not_end_the_others(
    placement: str, toy: Path, tmp_path: Path, plain: dict[str, list[int]]
) -> None:
    broken = {"name": "broken", "algorithm": f"{__name__}:{NotFinite.__name__}"}
    speculative = SpeculativeConfig.model_validate({"drafters": [{"name": "n-gram", "algorithm": "NGRAM"}, broken]})
    with make_llm(toy, speculative=speculative, max_running_requests=6) as llm:
        remote = None
        if placement == "colocated":
            remote = Colocated(llm, tmp_path)
            remote.start()
        assert finish(llm, requests_for(["n-gram", "broken"])) == plain
        counts = llm.engine.stats.labelled
        if remote is not None:
            assert remote.drafts.max_draft_tokens > 0, "its process is still connected"
            remote.close()
    drafted = counts["specray_drafter_draft_tokens_total"]
    assert drafted["n-gram"] > 0
    assert drafted["broken"] == 0
    faults = counts["specray_drafter_faults_total"]
    assert faults["broken"] > faults["n-gram"] == 0
    kind = DraftFault.NOT_A_NUMBER if placement == "inline" else DraftFault.MEMBER_NOT_A_NUMBER
    assert {name for name, count in counts["specray_draft_faults_total"].items() if count} == {kind}


def test_a_colocated_drafter_that_has_no_others_beside_it_is_dropped_when_its_logits_are_not_finite(
    toy: Path, tmp_path: Path, plain: dict[str, list[int]]
) -> None:
    """So that a new process takes its place, as for `algorithm`."""
    broken = {"name": "broken", "algorithm": f"{__name__}:{NotFinite.__name__}"}
    speculative = SpeculativeConfig.model_validate({"drafters": [broken]})
    with make_llm(toy, speculative=speculative, max_running_requests=6) as llm:
        remote = Colocated(llm, tmp_path)
        remote.start()
        assert finish(llm, requests_for(["broken"])) == plain
        assert remote.drafts.max_draft_tokens == 0
        remote.close()
        counts = llm.engine.stats.labelled["specray_draft_faults_total"]
    assert {name for name, count in counts.items() if count} == {DraftFault.NOT_A_NUMBER}


def test_a_request_that_moves_to_an_engine_without_its_drafter_continues(
    toy: Path, tmp_path: Path, plain: dict[str, list[int]]
) -> None:
    """As after a failover, or when its drafter was dropped."""
    with make_llm(toy, speculative=configured(("EAGLE3", "NGRAM"), toy, tmp_path)) as llm:
        requests = [
            EngineRequest(
                request.request_id,
                request.prompt_token_ids,
                request.params,
                drafter="dropped",
                emitted_token_ids=plain[request.request_id][:3],
            )
            for request in requests_for([])
            if len(plain[request.request_id]) > 3
        ]
        finished = finish(llm, requests)
        assert finished == {request_id: plain[request_id][3:] for request_id in finished}


def test_drafters_change_while_requests_run(toy: Path, tmp_path: Path, plain: dict[str, list[int]]) -> None:
    """A drafter is added and another one dropped between two steps; running requests go on."""
    before, after = (configured(names, toy, tmp_path) for names in (("EAGLE3", "NGRAM"), ("NGRAM", "EAGLE-chain")))
    with make_llm(toy, speculative=before, page_size=4) as llm:
        remote = Colocated(llm, tmp_path)
        remote.start()
        for request in requests_for(["EAGLE3", "NGRAM"]):
            llm.engine.add_request(request)
        tokens: dict[str, list[int]] = {request_id: [] for request_id in plain}
        for number in range(500):
            if number == 4:
                remote.start(speculative=after)
                llm.engine.drafter.replace(after, max_draft_tokens=11)
            for output in llm.engine.step():
                tokens[output.request_id] += output.token_ids
            if not llm.engine.has_work:
                break
        remote.close()
    assert tokens == plain


def test_a_new_process_has_read_nothing_of_running_requests_and_of_cached_prefixes(toy: Path, tmp_path: Path) -> None:
    """Drafts of a running request say nothing good of it, and a prefix that it has not read would stay cached."""
    with make_llm(toy, speculative=configured(("EAGLE3", "NGRAM"), toy, tmp_path), page_size=4) as llm:
        remote = Colocated(llm, tmp_path)
        remote.start()
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
        running = llm.engine.scheduler.running

        def num_cached() -> int:
            """Tokens of the same prompt in another request."""
            llm.engine.add_request(EngineRequest(f"r{len(running)}", PROMPTS[0], params))
            for _ in range(4):
                llm.engine.step()
            return running[-1].num_cached_tokens

        assert [num_cached(), num_cached()] == [0, 4]
        remote.start()
        while not running[1].is_detached:
            llm.engine.step()
        assert [num_cached(), num_cached()] == [0, 4]
        assert [request.acceptance.is_new_to_drafter for request in running] == [True, True, False, False]
        llm.engine.requests.abort([request.request_id for request in running])
        while llm.engine.has_work:
            llm.engine.step()
        remote.close()


def test_a_new_process_of_a_draft_model_reads_running_requests_again(toy: Path, tmp_path: Path) -> None:
    with make_llm(toy, speculative=METHODS["STANDALONE"](toy, tmp_path), page_size=4) as llm:
        remote = Colocated(llm, tmp_path)
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
        llm.engine.add_request(replace(requests_for([])[0], params=params))
        for _ in range(2):
            remote.start()
            for _ in range(3):
                llm.engine.step()
        [running] = llm.engine.scheduler.running
        assert running.acceptance.num_missed_tokens == 0
        llm.engine.requests.abort([running.request_id])
        while llm.engine.has_work:
            llm.engine.step()
        remote.close()


class Spy:
    """Records the position and the tokens of each tree that a drafter makes."""

    def __init__(self, drafter: Drafter) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.drafter = drafter
        self.trees: dict[int, list[int]] = {}  # by the position of the root

    def propose(self, context: ProposeContext) -> DraftTree:
        tree = self.drafter.propose(context)
        for request, lists in zip(context.requests, tree.to_lists(), strict=True):
            self.trees[request.end] = lists.tokens
        return tree

    def release(self, slots: Sequence[int]) -> None:
        self.drafter.release(slots)


def spied(llm: LLM, name: str) -> Spy:
    """Watch one of an engine's several drafters."""
    drafters = llm._executor.worker.drafts.drafter.drafter.members  # type: ignore[attr-defined]
    drafters[name] = spy = Spy(drafters[name])
    return spy


PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE-map", "NGRAM", "MTP-stack", "STANDALONE", "PARALLEL"])
def test_a_shadow_makes_the_trees_that_it_would_have_made_if_it_had_been_verified(
    name: str, toy: Path, tmp_path: Path
) -> None:
    """The same trees at the same places, although other drafters decide where steps begin."""
    both = several(**{"main": METHODS["NGRAM-short"], name: METHODS[name]})(toy, tmp_path)
    runs: list[tuple[dict[int, list[int]], dict[str, dict[str, float]]]] = []
    for options in ({"default_drafter": name}, {"default_drafter": "main", "shadow": {"drafter": name, "share": 1.0}}):
        speculative = SpeculativeConfig.model_validate(both.model_dump(exclude_defaults=True) | options)
        with make_llm(toy, speculative=speculative) as llm:
            spy = spied(llm, name)
            llm.generate([PROMPTS[7]], PARAMS)
            runs.append((spy.trees, llm.engine.stats.labelled))
    (verified, _), (shadowed, counts) = runs
    last = len(PROMPTS[7]) + PARAMS.max_tokens - 20  # near the end, trees are smaller than the drafter would make them
    shared = [place for place in verified if place in shadowed and place < last]
    assert len(shared) > 5
    assert [shadowed[place] for place in shared] == [verified[place] for place in shared]
    assert counts["specray_shadow_trees_total"][name] > 10
    assert counts["specray_drafter_verify_steps_total"][name] == 0


def test_a_shadows_acceptance_is_that_of_the_same_drafter_verified(toy: Path, tmp_path: Path) -> None:
    """Two drafters of the same method, so that the shadow has the steps of the verified one."""
    makes: dict[str, Any] = {"main": METHODS["EAGLE3"], "twin": METHODS["EAGLE3"]}
    both = several(**makes)(toy, tmp_path).model_dump(exclude_defaults=True)
    both |= {"default_drafter": "main", "shadow": {"drafter": "twin", "share": 1.0}}
    speculative = SpeculativeConfig.model_validate(both)
    # Otherwise the shadow sees every fourth step.
    with make_llm(toy, speculative=speculative, max_running_requests=4, disable_overlap_schedule=True) as llm:
        uses: list[DrafterUse] = []
        drafts = llm._executor.worker.drafts
        take = drafts.take_report

        def take_report() -> DraftReport:
            report = take()
            uses.extend(report.uses)
            return report

        drafts.take_report = take_report  # type: ignore[method-assign]
        llm.generate(PROMPTS, [SamplingParams(seed=i, max_tokens=40, ignore_eos=True) for i in range(len(PROMPTS))])
        counts = llm.engine.stats.labelled
    verified, accepted = (
        counts[f"specray_drafter_{what}_total"]["main"] for what in ("draft_tokens", "accepted_tokens")
    )
    trees = sum(use.num_shadow_trees for use in uses if use.drafter == "twin")
    assert accepted > 20
    assert counts["specray_shadow_trees_total"]["twin"] == trees
    # Trees that follow a request's last tokens are not compared, and the last ones verified are cut to its length.
    assert abs(counts["specray_shadow_accepted_tokens_total"]["twin"] - accepted) <= len(PROMPTS)
    assert abs(counts["specray_shadow_draft_tokens_total"]["twin"] - verified) <= 8 * len(PROMPTS)
