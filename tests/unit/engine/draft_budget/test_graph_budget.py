"""The budget of steps in CUDA graphs: depth follows the batch, by costs that were measured before the first request."""

from pathlib import Path
from random import Random

import pytest

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.draft_budget import make_budget
from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting
from specray.engine.draft_budget.costs import StepShape
from specray.engine.draft_budget.graphs import FORGET_AFTER, BucketCosts, GraphBudget
from specray.engine.executor import Capacity
from specray.step import BucketSeconds
from tests.support.engine import make_llm

MOST = 7  # drafts of a chain
RATE = 0.8  # of each draft, if the one before was accepted: 4.2 tokens a step with 7 drafts


def seconds(num_requests: int, num_nodes: int) -> float:
    """Of an 8B model on an H200, roughly: weights are read once for up to 163 rows of a step."""
    return 4e-3 * max(1.0, num_requests * num_nodes / 163) + 1e-4 * num_requests


BUCKETS = [
    BucketSeconds(rows, nodes, seconds(rows, nodes), (nodes - 1) * 2e-4)
    for rows in (1, 2, 4, 8, 16, 32, 64)
    for nodes in (1, 2, 4, 8)
]


def chosen(budget: GraphBudget, num_requests: int, rate: float = RATE, steps: int = 200) -> set[int]:
    """Drafts of each request in the last steps of chains whose drafts are accepted at this rate."""
    random, seen = Random(0), []
    requests = [RequestAcceptance() for _ in range(num_requests)]
    for _ in range(steps):
        shares = budget.shares([Drafting(MOST, request) for request in requests])
        seen.append(set(shares.num_drafts))
        for request, count in zip(requests, shares.num_drafts, strict=True):
            accepted = next((node for node in range(count) if random.random() > rate), count)
            budget.record_tree(request, count, range(1, 1 + accepted))
        most = max(shares.num_drafts)
        budget.record_step(StepShape(num_requests, num_requests * most, most), seconds(num_requests, 1 + most), 0.0)
    return set().union(*seen[-50:])


def test_depth_follows_the_batch() -> None:
    budget = GraphBudget(None)
    budget.record_bucket_seconds(BUCKETS)
    assert chosen(budget, 1) == {7}
    assert max(chosen(budget, 64)) <= 3
    assert chosen(budget, 8) == {7}
    assert chosen(GraphBudget(None), 64, steps=3) == {7}  # costs are not known yet


def test_drafts_that_are_not_accepted_are_turned_off_and_tried_again() -> None:
    budget = GraphBudget(None)
    budget.record_bucket_seconds(BUCKETS)
    assert chosen(budget, 64, rate=0.05) == {0}
    request = Drafting(MOST, RequestAcceptance())
    assert not budget.shares([request] * 64).runs_drafter
    assert not budget.shares([request] * 64, num_reading=1).runs_drafter
    seen = [max(budget.shares([request] * 64).num_drafts) for _ in range(FORGET_AFTER)]
    assert (seen[0], seen[-1]) == (0, MOST)


def test_shadowed_requests_draft_whole_trees_where_drafts_do_not_pay() -> None:
    budget = GraphBudget(None)
    budget.record_bucket_seconds(BUCKETS)
    assert chosen(budget, 64, rate=0.05) == {0}
    shadowed = Drafting(MOST, RequestAcceptance(), is_compared=True)
    shares = budget.shares([shadowed, *[Drafting(MOST, RequestAcceptance())] * 63])
    assert shares.num_drafts == [MOST, *[0] * 63]
    assert shares.runs_drafter


def test_requests_that_the_drafter_has_not_read_have_no_drafts() -> None:
    budget = GraphBudget(None)
    budget.record_bucket_seconds(BUCKETS)
    missed = Drafting(MOST, RequestAcceptance(num_missed_tokens=100))
    assert budget.shares([missed, Drafting(MOST, RequestAcceptance())]).num_drafts == [0, MOST]


def test_trees_of_a_running_request_of_a_drafter_that_was_replaced_count_for_it_alone() -> None:
    budget = GraphBudget(None)
    budget.record_bucket_seconds(BUCKETS)
    assert chosen(budget, 1) == {MOST}
    running = RequestAcceptance(is_new_to_drafter=True)
    assert budget.shares([Drafting(MOST, running)]).num_drafts == [MOST]
    for _ in range(1000):
        budget.record_tree(running, MOST, [])
    assert budget.shares([Drafting(MOST, running)] * 64).num_drafts == [0] * 64
    assert budget.shares([Drafting(MOST, RequestAcceptance())]).num_drafts == [MOST]


def test_times_of_smaller_trees_do_not_limit_another_drafter(toy: Path) -> None:
    with make_llm(toy) as llm:
        llm.engine.drafter.bucket_seconds = [BucketSeconds(4, 1, 1e-3, 0.0)]
        for most, kept in ((3, False), (0, True)):
            budget = GraphBudget(None)
            llm.engine.drafter.replace(SpeculativeConfig(algorithm="NGRAM"), most, budget)
            assert (budget._costs is not None) is kept


def test_a_share_of_the_steps_is_plain() -> None:
    budget = GraphBudget(None, plain_share=0.25)
    shares = [budget.shares([Drafting(MOST, RequestAcceptance())]).num_drafts for _ in range(400)]
    assert shares.count([0]) == pytest.approx(100, abs=10)
    assert shares.count([0]) + shares.count([MOST]) == 400


def test_a_limit_of_all_drafts_is_kept() -> None:
    assert GraphBudget(9).shares([Drafting(MOST, RequestAcceptance())] * 3).num_drafts == [3, 3, 3]


def test_costs_follow_what_steps_take() -> None:
    """A step costs what its bucket does. All rise when contexts grow, one beside the others when it alone is slower."""
    costs = BucketCosts(BUCKETS)
    assert costs.seconds(5, 2) == costs.seconds(8, 3) == pytest.approx(seconds(8, 4) + 6e-4)
    assert costs.seconds(128, 3) == pytest.approx(2 * costs.seconds(64, 3))
    for _ in range(100):
        costs.observe(StepShape(8, 24, 3), 2 * (seconds(8, 4) + 6e-4))
    assert costs.seconds(8, 3) == pytest.approx(2 * (seconds(8, 4) + 6e-4), rel=0.05)
    assert costs.seconds(1, 0) > 1.5 * seconds(1, 1)


def test_a_step_of_unequal_trees_costs_what_all_their_nodes_do() -> None:
    """Eight whole trees among 64 said that a step of 64 whole trees is nearly as fast as a plain one."""
    costs = BucketCosts(BUCKETS)
    whole = costs.seconds(64, MOST)
    for _ in range(200):
        costs.observe(StepShape(64, 8 * MOST, MOST), costs.seconds(64, 1))
    assert costs.seconds(64, MOST) == pytest.approx(whole)
    drafted, plain = costs.seconds(64, 1), costs.seconds(64, 0)
    for _ in range(100):  # no tree came in time, but the drafter ran
        costs.observe(StepShape(64, 0, MOST), drafted)
    assert costs.seconds(64, 0) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("options", "learns"), [({}, True), ({"budget": "static"}, False), ({"verification": "rejection"}, False)]
)
def test_an_engine_with_graphs_learns_its_budget(options: dict[str, str], learns: bool) -> None:
    config = EngineConfig(speculative=SpeculativeConfig(algorithm="NGRAM", **options))
    capacity = Capacity(40, MOST, 100, 50, [1], has_graphs=True, has_one_text=False, learns_budget=True)
    assert isinstance(make_budget(config, config.speculative, capacity), GraphBudget) is learns
