"""A step with drafts may begin before the one before it is finished: the kernels draft from what that one commits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import EngineConfig
from specray.ops.cpu import threads
from specray.ops.cpu.library import kernels
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, composite_of
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.parallel import ParallelDrafter
from specray.spec_decode.predicted_output import PredictionDrafter
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DrafterUse, DraftLimit, NewRequest, RequestResult, SamplingOptions, ScheduledRequest, StepPlan
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.distributions import OPTIONS
from tests.support.methods import METHODS, Make, eagle, ngram, several

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")

PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5, 6, 7], [0, 2, 4, 2, 4, 2, 4]]
PAGE, NUM_PAGES = 16, 8  # of a request
GREEDY = OPTIONS._replace(temperature=0.0, eos_token_ids=[])
LIMIT = DraftLimit(20, 20)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threads, "_SMALL", 0)  # the toy model's weights are small enough for one thread
    count: int = request.param
    return count


@dataclass
class Driver:
    """A worker with an EAGLE-3 head, and its steps."""

    worker: Worker
    ahead: bool  # whether steps begin before the ones before are finished, if they can
    predicted: Sequence[int] = ()  # by the client, of the first request
    drafters: Sequence[tuple[str, str]] = (("", ""),) * 3  # of several: those of each request, and their shadows
    num_ahead: int = 0
    results: list[list[RequestResult]] = field(default_factory=list)
    uses: list[list[DrafterUse]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    broken: int | None = None  # a slot whose KV is NaN after its prompt
    broken_token: int | None = None  # one that the target cannot read after the prompts

    def run(
        self, count: int, options: Sequence[SamplingOptions], limits: Sequence[DraftLimit] = (), **plan: Any
    ) -> list[list[RequestResult]]:
        """The results of a step that starts a request for each of `options` and of `count` steps more."""
        slots, new = range(len(options)), []
        limits = limits or [LIMIT] * len(options)
        for slot, each in enumerate(options):
            blocks = [1 + NUM_PAGES * slot + page for page in range(NUM_PAGES)]
            predicted = () if slot else self.predicted
            prompt = (PROMPTS[slot], len(PROMPTS[slot]), 0)
            drafter, shadow = self.drafters[slot]
            request = NewRequest(slot, *prompt, blocks, each, "", predicted_token_ids=predicted)
            new.append(request._replace(drafter=drafter, shadow=shadow))
        self.step(StepPlan(1, [], new, [ScheduledRequest(r.slot, 100, limits[r.slot], []) for r in new], **plan))
        for number in range(2, 2 + count):
            rows = [ScheduledRequest(slot, 1, limits[slot], []) for slot in slots]
            self.step(StepPlan(number, [], [], rows, **plan))
        while self.worker.num_started:
            self.finish()
        return self.results

    def step(self, plan: StepPlan) -> None:
        while self.worker.num_started and not (self.ahead and self.worker.can_begin(plan)):
            self.finish()
        if plan.step_id == 2 and self.broken is not None:
            self.worker._runner.kv.pool[:, PAGE * (1 + NUM_PAGES * self.broken)] = torch.nan
        if plan.step_id == 2 and self.broken_token is not None:
            self.worker._runner.model.embedding.weight[self.broken_token] = torch.nan
        self.num_ahead += self.worker.num_started
        self.worker.begin(plan)
        if self.worker.num_started > 1:
            self.finish()

    def finish(self) -> None:
        result = self.worker.finish()
        self.results.append(result.rows)
        self.uses.append(list(result.drafters))
        self.faults += result.draft_faults
        self.worker.propose()

    def emitted(self, slot: int) -> list[int]:
        return [token for rows in self.results for token in rows[slot].token_ids]

    @property
    def drafter(self) -> EagleDrafter | ParallelDrafter:
        drafts = self.worker.drafts
        assert isinstance(drafts, InlineDrafts)
        assert isinstance(drafts.drafter, PredictionDrafter)
        assert isinstance(drafts.drafter.drafter, EagleDrafter | ParallelDrafter)
        return drafts.drafter.drafter

    @property
    def head_kv(self) -> torch.Tensor:
        """KV of the drafter: [layers, slots, ...]"""
        pool: torch.Tensor = self.drafter._attention.pool  # type: ignore[attr-defined]
        return pool


def make(folder: Path, tmp_path: Path, num_threads: int, *, ahead: bool, method: str | Make = "EAGLE3") -> Driver:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": 512}
    speculative = (METHODS[method] if isinstance(method, str) else method)(folder, tmp_path)
    config = EngineConfig(model=str(folder), num_threads=num_threads, speculative=speculative, **options)
    return Driver(start_worker(config), ahead)


SAMPLING = {
    "greedy": [GREEDY] * 3,
    "sampled": [GREEDY._replace(temperature=0.7, top_p=0.9, seed=row) for row in range(3)],
    "both": [GREEDY, GREEDY._replace(temperature=1.0, seed=5), GREEDY],
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", ["EAGLE3", "EAGLE3-chain", "EAGLE3-wide", "PARALLEL"])
def test_the_drafts_and_their_verification_are_the_same(
    method: str, batch_size: int, sampling: str, toy: Path, tmp_path: Path, num_threads: int
) -> None:
    """Tokens, accepted nodes, numbers and scores of drafts."""
    options = SAMPLING[sampling][:batch_size]
    limits = [DraftLimit(20, 20, 1e-6)] * batch_size
    expected = make(toy, tmp_path, num_threads, ahead=False, method=method).run(24, options, limits)
    ahead = make(toy, tmp_path, num_threads, ahead=True, method=method)
    assert ahead.run(24, options, limits) == expected
    assert ahead.num_ahead == 23  # the prompt's step is not followed at once
    assert batch_size == 1 or any(row.accepted_nodes for rows in expected for row in rows)
    assert all(row.draft_scores for rows in expected[1:] for row in rows)


@pytest.mark.parametrize(
    "limits",
    [
        [DraftLimit(2, 20), DraftLimit(20, 20), DraftLimit(1, 20)],
        [DraftLimit(20, 20, 0.05), DraftLimit(20, 20, 0.9), DraftLimit(20, 20)],
    ],
    ids=["numbers", "scores"],
)
def test_limits_of_drafts_hold(limits: list[DraftLimit], toy: Path, tmp_path: Path, num_threads: int) -> None:
    expected = make(toy, tmp_path, num_threads, ahead=False).run(6, SAMPLING["both"], limits)
    ahead = make(toy, tmp_path, num_threads, ahead=True)
    assert ahead.run(6, SAMPLING["both"], limits) == expected
    assert ahead.num_ahead == 5
    assert len({row.num_draft_tokens for rows in expected for row in rows}) > 1


@pytest.mark.parametrize(
    "limits",
    [[LIMIT, DraftLimit(0, 0), LIMIT], [LIMIT, DraftLimit(20, 1), LIMIT]],
    ids=["a request without drafts", "fewer levels"],
)
def test_other_limits_wait_for_the_result(
    limits: list[DraftLimit], toy: Path, tmp_path: Path, num_threads: int
) -> None:
    expected = make(toy, tmp_path, num_threads, ahead=False).run(4, SAMPLING["greedy"], limits)
    ahead = make(toy, tmp_path, num_threads, ahead=True)
    assert ahead.run(4, SAMPLING["greedy"], limits) == expected
    assert ahead.num_ahead == 0


def test_a_limit_of_levels_holds_when_more_drafts_are_verified(toy: Path, tmp_path: Path, num_threads: int) -> None:
    """The step before allowed two drafts, so that its trees could not have more levels than this request's limit."""
    driver = make(toy, tmp_path, num_threads, ahead=True)
    driver.run(2, [GREEDY] * 2)
    before, after = (
        [ScheduledRequest(0, 1, DraftLimit(count, 2), []), ScheduledRequest(1, 1, LIMIT, [])] for count in (2, 8)
    )
    driver.step(StepPlan(4, [], [], before))
    assert not driver.worker.can_begin(StepPlan(5, [], [], after))
    assert driver.worker.can_begin(StepPlan(5, [], [], before))


def test_a_request_that_ends_takes_no_part_in_the_step_that_has_begun(
    toy: Path, tmp_path: Path, num_threads: int
) -> None:
    whole = make(toy, tmp_path, num_threads, ahead=False)
    whole.run(8, SAMPLING["greedy"])
    end = whole.emitted(0)[6]
    length = 1 + whole.emitted(0).index(end)
    options = [GREEDY._replace(eos_token_ids=[end]), GREEDY, GREEDY]
    ahead = make(toy, tmp_path, num_threads, ahead=True)
    ahead.run(8, options)
    assert ahead.num_ahead > 1
    assert ahead.emitted(0)[:length] == whole.emitted(0)[:length]
    assert len(ahead.emitted(0)) < len(whole.emitted(0))
    assert [rows[0].is_deferred for rows in ahead.results].count(True) > 0
    for slot in (1, 2):
        count = min(len(ahead.emitted(slot)), len(whole.emitted(slot)))
        assert count > length
        assert ahead.emitted(slot)[:count] == whole.emitted(slot)[:count]


@pytest.mark.parametrize("others", [[], [GREEDY]], ids=["alone", "with another request"])
def test_the_head_has_read_all_of_a_request_that_ended(
    others: list[SamplingOptions], toy: Path, tmp_path: Path, num_threads: int
) -> None:
    """Its blocks may be shared. The step that has begun is cancelled, if no other request is left."""
    whole = make(toy, tmp_path, num_threads, ahead=False)
    whole.run(6, [GREEDY])
    options = [GREEDY._replace(eos_token_ids=[whole.emitted(0)[6]]), *others]
    drivers = [make(toy, tmp_path, num_threads, ahead=ahead) for ahead in (False, True)]
    for driver in drivers:
        driver.run(6, options)
    one_by_one, ahead = drivers
    assert ahead.num_ahead > 1
    assert ahead.emitted(0) == one_by_one.emitted(0)
    assert ahead.head_kv[:, :PAGE].count_nonzero() == 0
    used = slice(PAGE, PAGE + len(PROMPTS[0]) + len(ahead.emitted(0)) - 1)
    torch.testing.assert_close(ahead.head_kv[:, used], one_by_one.head_kv[:, used], rtol=0, atol=0)
    assert ahead.head_kv[:, used].abs().sum(dim=(0, 2, 3, 4)).min() > 0


@pytest.mark.parametrize("broken", [0, 2])
def test_logits_that_are_not_finite_end_their_request_alone(
    broken: int, toy: Path, tmp_path: Path, num_threads: int
) -> None:
    whole = make(toy, tmp_path, num_threads, ahead=False)
    whole.run(8, SAMPLING["greedy"])
    ahead = make(toy, tmp_path, num_threads, ahead=True)
    ahead.broken = broken
    ahead.run(8, SAMPLING["greedy"])
    assert ahead.num_ahead >= 1
    errors = [rows[broken].error for rows in ahead.results if rows[broken].error]
    assert len(errors) == 1
    assert "NaN" in str(errors[0])
    assert ahead.faults == [], "the head is not to blame for what it read"
    for slot in {0, 1, 2} - {broken}:
        count = min(len(ahead.emitted(slot)), len(whole.emitted(slot)))
        assert count > 6
        assert ahead.emitted(slot)[:count] == whole.emitted(slot)[:count]


def test_a_draft_whose_logits_are_not_finite_leaves_the_others_their_hidden_states(
    toy: Path, tmp_path: Path, num_threads: int
) -> None:
    """It is accepted, and its request ends; the next step has begun with a tree of that request before the others'.

    The head is one that does not read the tokens that it drafts.
    """
    options = [GREEDY._replace(temperature=1.0, seed=200 + row) for row in range(3)]
    whole = make(toy, tmp_path, num_threads, ahead=False, method="PARALLEL")
    whole.run(10, options)
    accepted = [rows[0].token_ids[0] for rows in whole.results[2:] if rows[0].accepted_nodes]
    known = {*PROMPTS[0], *whole.emitted(1), *whole.emitted(2)}
    drivers = [make(toy, tmp_path, num_threads, ahead=ahead, method="PARALLEL") for ahead in (False, True)]
    for driver in drivers:
        driver.broken_token = next(token for token in accepted if token not in known)
        driver.run(10, options)
    one_by_one, ahead = drivers
    assert ahead.num_ahead > 1
    assert [rows[0].error for rows in ahead.results if rows[0].error]
    assert ahead.faults == one_by_one.faults == []
    for slot in (1, 2):
        count = min(len(driver.emitted(slot)) for driver in drivers)
        assert count > 6
        first = PAGE * (1 + NUM_PAGES * slot)
        same = slice(first, first + len(PROMPTS[slot]) + count - 3)
        torch.testing.assert_close(ahead.head_kv[:, same], one_by_one.head_kv[:, same], rtol=0, atol=0)


class Watched:
    """A drafter that has to be asked for each tree."""

    def __init__(self, drafter: Drafter) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.release, self._propose = drafter.release, drafter.propose
        self.num_asked = 0

    def propose(self, context: ProposeContext) -> DraftTree:
        self.num_asked += 1
        return self._propose(context)


def test_a_drafter_that_takes_the_heads_place_is_asked(toy: Path, tmp_path: Path, num_threads: int) -> None:
    expected = make(toy, tmp_path, num_threads, ahead=False).run(4, SAMPLING["both"])
    driver = make(toy, tmp_path, num_threads, ahead=True)
    drafts = driver.worker.drafts
    assert isinstance(drafts, InlineDrafts)
    drafts.drafter = watched = Watched(drafts.drafter)
    assert driver.run(4, SAMPLING["both"]) == expected
    assert (driver.num_ahead, watched.num_asked) == (0, 5)


def test_a_predicted_output_is_followed_by_the_host(toy: Path, tmp_path: Path, num_threads: int) -> None:
    whole = make(toy, tmp_path, num_threads, ahead=False)
    whole.run(8, SAMPLING["greedy"])
    found = []
    for ahead in (False, True):
        driver = make(toy, tmp_path, num_threads, ahead=ahead)
        driver.predicted = whole.emitted(0)
        found.append(driver.run(4, SAMPLING["greedy"]))
    assert driver.num_ahead == 0
    assert found[0] == found[1]
    assert any(row.accepted_nodes for rows in found[0] for row in rows)


HEADS = several(head=eagle(3, draft_vocab_size=40), other=eagle(3, shape=(3, 2, 6)), lookup=ngram())


def member(driver: Driver, name: str) -> EagleDrafter:
    """One of several drafters."""
    drafts = driver.worker.drafts
    assert isinstance(drafts, InlineDrafts)
    composite = composite_of(drafts.drafter)
    assert composite is not None
    drafter = composite.members[name]
    assert isinstance(drafter, EagleDrafter)
    return drafter


def test_one_of_several_drafters_drafts_ahead(toy: Path, tmp_path: Path, num_threads: int) -> None:
    """If it is the drafter of all requests. The others learn which KV slots these have got."""
    found = []
    for ahead in (False, True):
        driver = make(toy, tmp_path, num_threads, ahead=ahead, method=HEADS)
        found.append(driver.run(12, SAMPLING["both"]))
    assert found[0] == found[1]
    assert driver.num_ahead == 11
    assert all([use.drafter for use in uses] == ["head"] for uses in driver.uses[2:])
    assert all(uses[0].seconds > 0 for uses in driver.uses[2:])
    other = member(driver, "other")
    block = PAGE * 30
    other._written._is_written[block : block + PAGE] = True  # another request's, which had this block before
    for number, blocks in enumerate([[], [30], []], 20):  # of the first request
        others = [ScheduledRequest(slot, 1, LIMIT, []) for slot in (1, 2)]
        driver.step(StepPlan(number, [], [], [ScheduledRequest(0, 1, LIMIT, blocks), *others]))
    assert driver.num_ahead == 13
    assert not other._written._is_written[block : block + PAGE].any()


def test_all_of_several_drafters_read_a_prompt_of_one_token(
    toy: Path, tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[5]])
    driver = make(toy, tmp_path, num_threads, ahead=True, method=HEADS)
    driver.run(3, [GREEDY])
    assert driver.num_ahead == 2
    assert member(driver, "other")._written._is_written[PAGE]


@pytest.mark.parametrize(
    "drafters",
    [
        [("head", ""), ("other", ""), ("head", "")],
        [("lookup", "")] * 3,
    ],
    ids=["two heads", "n-grams"],
)
def test_other_requests_of_several_drafters_wait_for_the_result(
    drafters: list[tuple[str, str]], toy: Path, tmp_path: Path, num_threads: int
) -> None:
    found = []
    for ahead in (False, True):
        driver = make(toy, tmp_path, num_threads, ahead=ahead, method=HEADS)
        driver.drafters = drafters
        found.append(driver.run(4, SAMPLING["both"]))
    assert found[0] == found[1]
    assert driver.num_ahead == 0


@pytest.mark.parametrize("shadow", ["other", "lookup"])
def test_a_shadow_sees_every_fourth_step_and_the_tokens_of_all(
    shadow: str, toy: Path, tmp_path: Path, num_threads: int
) -> None:
    """Its trees are those that it makes when it sees each step; so is its KV, if it has any."""
    trees: list[dict[tuple[int, int], list[int]]] = []
    found, kv = [], []
    for ahead in (False, True):
        driver = make(toy, tmp_path, num_threads, ahead=ahead, method=HEADS)
        driver.drafters = [("head", ""), ("head", shadow), ("head", "")]
        drafts = driver.worker.drafts
        assert isinstance(drafts, InlineDrafts)
        composite = composite_of(drafts.drafter)
        assert composite is not None
        drafter = composite.members[shadow]
        trees.append(recorded(drafter))
        found.append(driver.run(12, SAMPLING["both"]))
        if isinstance(drafter, EagleDrafter):
            kv.append(drafter._attention.pool.clone())  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert driver.num_ahead == 9
    every, fourth = ({root: tree for root, tree in seen.items() if root[0] == 1} for seen in trees)
    assert (len(every), len(fourth)) == (13, 4)
    assert fourth.items() <= every.items()
    if kv:
        slots = slice(PAGE * (1 + NUM_PAGES), PAGE * (1 + NUM_PAGES) + len(PROMPTS[1]) + len(driver.emitted(1)) - 1)
        assert kv[0][:, slots].abs().sum(dim=(0, 2, 3, 4)).min() > 0
        torch.testing.assert_close(kv[1][:, slots], kv[0][:, slots], rtol=0, atol=0)


def recorded(drafter: Drafter) -> dict[tuple[int, int], list[int]]:
    """The tokens of the trees that a drafter makes from now on, by slot and position of the root."""
    trees: dict[tuple[int, int], list[int]] = {}
    propose = drafter.propose

    def record(context: ProposeContext) -> DraftTree:
        if context.aux_hidden_states is not None:
            requests = context.requests + context.unfinished
            assert len(context.aux_hidden_states) == sum(request.end - request.start for request in requests)
        tree = propose(context)
        for request, lists in zip(context.requests, tree.to_lists(), strict=True):
            trees[request.slot, request.end] = lists.tokens
        return tree

    drafter.propose = record  # type: ignore[method-assign]
    return trees


@pytest.mark.parametrize("num_without", [1, 2])
def test_a_shadow_misses_tokens_of_steps_without_the_drafter(
    num_without: int, toy: Path, tmp_path: Path, num_threads: int
) -> None:
    """What was put off before these steps is dropped, because tokens between are missing."""
    driver = make(toy, tmp_path, num_threads, ahead=True, method=HEADS)
    driver.drafters = [("head", "other")]
    trees = recorded(member(driver, "other"))
    driver.run(1, [GREEDY])
    row = ScheduledRequest(0, 1, LIMIT, [])
    for number in range(10, 13):
        driver.step(StepPlan(number, [], [], [row]))
    for number in range(20, 20 + num_without):
        driver.step(StepPlan(number, [], [], [row], runs_drafter=False))
    for number in range(30, 36):
        driver.step(StepPlan(number, [], [], [row]))
    while driver.worker.num_started:
        driver.finish()
    expected = make(toy, tmp_path, num_threads, ahead=False)
    expected.run(30, [GREEDY])
    count = len(driver.emitted(0))
    assert count > 10
    assert len(trees) > 2
    assert driver.emitted(0) == expected.emitted(0)[:count]


def test_kv_of_an_earlier_owner_is_not_taken_for_the_heads(toy: Path, tmp_path: Path, num_threads: int) -> None:
    """Where the head was not called after a step, it has not written the KV of that step's tokens."""
    driver = make(toy, tmp_path, num_threads, ahead=True)
    driver.run(2, [GREEDY])
    driver.drafter._written._is_written[:] = True  # as if all KV slots had been other requests' before
    without, row = ScheduledRequest(0, 1, DraftLimit(0, 0), []), ScheduledRequest(0, 1, LIMIT, [])
    driver.step(StepPlan(4, [], [], [without], runs_drafter=False))
    driver.finish()
    driver.step(StepPlan(5, [], [], [row]))
    assert not driver.worker.can_begin(StepPlan(6, [], [], [row]))


def test_the_time_of_drafting_is_not_that_of_the_pass(toy: Path, tmp_path: Path, num_threads: int) -> None:
    driver = make(toy, tmp_path, num_threads, ahead=True)
    driver.run(2, SAMPLING["greedy"])
    worker = driver.worker
    rows = [ScheduledRequest(slot, 1, LIMIT, []) for slot in range(3)]
    worker.begin(StepPlan(4, [], [], rows))
    assert worker.can_begin(StepPlan(5, [], [], rows))
    worker.begin(StepPlan(5, [], [], rows))
    start = time.perf_counter()
    worker.finish()
    times = worker.finish().times
    assert times.draft > 0
    assert times.forward > 0
    assert times.draft + times.forward <= time.perf_counter() - start
