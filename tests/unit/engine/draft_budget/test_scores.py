"""Acceptance by score: what is expected of a cut, and which cut pays."""

from random import Random

import numpy as np
import pytest

from specray.engine.draft_budget.acceptance import (
    EDGES,
    NUM_FIRST_TREES,
    RequestAcceptance,
    ScoreAcceptance,
    ScoredTree,
    best_cut,
)
from specray.engine.draft_budget.auto import AutoBudget
from specray.engine.draft_budget.budget import Drafting
from specray.engine.draft_budget.costs import StepCosts, StepShape

MOST = 8


def tree(random: Random) -> tuple[list[float], list[int]]:
    """(scores, accepted nodes) of a chain whose drafter is right as often as it says; half are hopeless."""
    scores, accepted, score, is_right = [], [], 1.0, True
    sure = random.random() < 0.5
    for node in range(1, MOST + 1):
        chance = 0.9 if sure else 0.15
        score *= chance
        is_right = is_right and random.random() < chance
        scores.append(score)
        accepted += [node] if is_right else []
    return scores, accepted


def learnt(num_trees: int = 2000, at_once: int = 1) -> ScoreAcceptance:
    acceptance, random = ScoreAcceptance(), Random(0)
    for _ in range(num_trees // at_once):
        trees = [tree(random) for _ in range(at_once)]
        acceptance.observe([ScoredTree(scores, MOST, accepted) for scores, accepted in trees])
    return acceptance


def costs(fixed: float, per_token: float) -> StepCosts:
    costs = StepCosts()
    for num_drafts in (0, 4, 8, 16, 32):
        costs.observe(StepShape(1, num_drafts, num_drafts), fixed + per_token * (1 + num_drafts), 0.0)
    return costs


def test_expected_nodes_are_those_that_were_accepted() -> None:
    accepted, verified = learnt().gains()
    random = Random(1)
    trees = [tree(random) for _ in range(4000)]
    for num_drafts in (1, 4, MOST):
        for cut in (0, 5, 9):
            kept = [sum(score >= EDGES[cut] for score in scores[:num_drafts]) for scores, _ in trees]
            gained = [sum(node <= count for node in nodes) for (_, nodes), count in zip(trees, kept, strict=True)]
            assert verified[num_drafts - 1, cut] == pytest.approx(np.mean(kept), abs=0.15)
            assert accepted[num_drafts - 1, cut] == pytest.approx(np.mean(gained), abs=0.4)


def test_trees_of_one_step_count_like_those_of_several() -> None:
    for one, many in zip(learnt().gains(), learnt(at_once=16).gains(), strict=True):
        np.testing.assert_allclose(one, many, atol=0.05, rtol=0.02)


def test_trees_of_different_sizes_are_counted_together() -> None:
    acceptance = ScoreAcceptance()
    trees = [ScoredTree([0.9, 0.5], 2, [1]), ScoredTree([], 0, []), ScoredTree([0.9, 0.7, 0.1], 1, [1])]
    expected = acceptance.expected(trees)
    assert expected == pytest.approx([0.9 + 0.5, 0.0, 0.9])  # before the first tree, scores are believed
    acceptance.observe(trees)
    accepted, verified = acceptance.gains()
    assert verified[:, 0] == pytest.approx([1, 2, 3])  # of trees that have a node at the place
    assert acceptance.num_trees == 3
    assert accepted[0, 0] > 0.9  # both first nodes were accepted


def test_the_first_score_at_a_new_place_weighs_no_more_than_the_next_ones() -> None:
    """As when trees become larger after long."""
    acceptance = ScoreAcceptance()
    for _ in range(600):
        acceptance.observe([ScoredTree([0.9], 1, [])])
    for score in (0.01, *[0.9] * 9):
        acceptance.observe([ScoredTree([0.9, score], 2, [])])
    _, verified = acceptance.gains()
    likely = int(np.searchsorted(EDGES, 0.5))
    assert verified[1, likely] == pytest.approx(1.9)


def test_cheap_nodes_are_all_verified_and_dear_ones_only_if_likely() -> None:
    acceptance = learnt()
    assert best_cut(acceptance, 1, 1, 99, costs(1.0, 1e-5), 1.0) == (MOST, 0.0)
    num_drafts, score = best_cut(acceptance, 1, 1, 99, costs(1.0, 0.25), 1.0)
    assert num_drafts > 2
    assert score >= 0.1
    assert best_cut(acceptance, 1, 1, 99, costs(0.0, 1.0), 1.0) == (0, 0.0)


@pytest.mark.filterwarnings("error")
def test_whole_trees_are_verified_until_costs_are_known() -> None:
    assert best_cut(learnt(), 1, 1, 99, StepCosts(), 1.0) == (MOST, 0.0)


def test_a_limit_below_the_number_of_requests_counts_the_drafts_that_it_leaves() -> None:
    """A draft for one of sixteen requests gains less than a step with drafts costs."""
    acceptance, seconds = learnt(), StepCosts()
    for num_drafts in (0, 1, 16, 128):
        seconds.observe(StepShape(16, num_drafts, min(num_drafts, 8)), 0.01, 0.002 if num_drafts else 0.0)
    assert best_cut(acceptance, 16, 16, 128, seconds, 1.0)[0] > 0
    assert best_cut(acceptance, 16, 16, 1, seconds, 1.0) == (0, 0.0)
    assert best_cut(acceptance, 16, 16, 34, seconds, 1.0)[0] <= 2


def test_a_cut_generates_more_than_every_number_of_drafts() -> None:
    """Half of the trees are hopeless: only their scores tell which."""
    acceptance, seconds = learnt(), costs(1.0, 0.25)
    accepted, verified = acceptance.gains()
    num_drafts, score = best_cut(acceptance, 1, 1, 99, seconds, 1.0)
    cut = int(np.searchsorted(EDGES, score))
    chosen = (1 + accepted[num_drafts - 1, cut]) / seconds.target(1 + verified[num_drafts - 1, cut])
    fixed = max((1 + accepted[place, 0]) / seconds.target(1 + verified[place, 0]) for place in range(MOST))
    assert chosen > 1.05 * fixed


def test_requests_whose_drafts_are_accepted_less_need_likelier_drafts() -> None:
    budget, random, good, bad = AutoBudget(None), Random(0), RequestAcceptance(), RequestAcceptance()
    for _ in range(NUM_FIRST_TREES + 200):
        scores, accepted = tree(random)
        budget.record_tree(good, MOST, accepted, scores)
        budget.record_tree(bad, MOST, [], scores)
        shares = budget.shares([Drafting(MOST, good), Drafting(MOST, bad)])
        shape = StepShape(2, sum(shares.num_drafts), max(shares.num_drafts))
        budget.record_step(shape, 1.0 + 0.1 * shape.num_tokens, 0.0)
    assert shares.min_scores is not None
    assert shares.min_scores[1] > 2 * shares.min_scores[0]


def test_scores_that_are_no_probabilities_do_no_harm() -> None:
    """A drafter of a user's own, in the target's process, may return any."""
    acceptance = ScoreAcceptance()
    acceptance.observe([ScoredTree([-2.0, float("nan"), 3.0], 3, [1])])
    assert np.isfinite(acceptance.gains()).all()
