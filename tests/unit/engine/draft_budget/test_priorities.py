"""Under load, requests of a higher priority get the drafts; a tenant gains nothing against others."""

import pytest

from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.auto import AutoBudget
from specray.engine.draft_budget.budget import Drafting
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.draft_budget.static import StaticBudget, shares_by_weight
from specray.engine.draft_limits import draft_weights

URGENT, USUAL, LATER = -1, 0, 1


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([("a", USUAL)] * 3, [1, 1, 1]),
        ([("a", URGENT), ("a", USUAL)], [4 / 3, 2 / 3]),
        ([("a", URGENT), ("b", USUAL)], [1, 1]),  # another tenant's requests do not matter
        ([("a", -(2**31)), ("a", 2**31 - 1)], [32 / 17, 2 / 17]),  # vLLM's priorities may be any numbers
        ([], []),
    ],
)
def test_weights_double_with_each_priority_of_a_tenant(requests: list[tuple[str, int]], expected: list[float]) -> None:
    assert draft_weights(requests) == pytest.approx(expected)


def test_a_limit_is_shared_by_weight() -> None:
    assert shares_by_weight([9, 9, 9], [2.0, 1.0, 1.0], 8) == [4, 2, 2]
    assert shares_by_weight([1, 9, 9], [2.0, 1.0, 1.0], 8) == [1, 4, 3], "what is not wanted goes to the others"
    requests = [Drafting(9, RequestAcceptance(), weight=weight) for weight in draft_weights([("", 1), ("", -1)])]
    assert StaticBudget(10).shares(requests).num_drafts == [2, 8]


def loaded_budget(scores: tuple[float, ...]) -> AutoBudget:
    """An automatic budget of a machine on which each draft costs a quarter of a plain step."""
    costs = StepCosts()
    for _ in range(64):
        for count in (0, 4, 16):
            costs.observe(StepShape(2, count, count // 2), 0.02 + 0.005 * count, 0.0)
    budget = AutoBudget(None, costs)
    for number in range(64):
        accepted = [1, 2] if number % 2 else [1] if number % 5 else []
        budget.record_tree(RequestAcceptance(), 4, accepted, scores)
    return budget


@pytest.mark.parametrize("scores", [(), (0.8, 0.45, 0.2, 0.1)], ids=["by place", "by score"])
def test_the_automatic_budget_drafts_more_for_the_urgent_request(scores: tuple[float, ...]) -> None:
    def expected(*weights: float) -> tuple[list[int], list[float]]:
        shares = loaded_budget(scores).shares([Drafting(4, RequestAcceptance(), weight=weight) for weight in weights])
        return shares.num_drafts, shares.min_scores or []

    (equal, equal_scores), (drafts, least) = expected(1.0, 1.0), expected(*draft_weights([("", -2), ("", 2)]))
    assert equal[0] == equal[1]
    assert equal_scores[0] == equal_scores[1]
    assert (drafts[0], -least[0]) > (drafts[1], -least[1])


def test_a_request_with_a_shadow_drafts_whole_trees_although_they_do_not_pay() -> None:
    """A budget that stops drafting would hide that the shadow is better."""
    costs = StepCosts()
    for _ in range(64):
        for count in (0, 4):
            costs.observe(StepShape(1, count, count), 0.02 * (1 + count), 0.0)
    budget = AutoBudget(None, costs)
    for _ in range(64):
        budget.record_tree(RequestAcceptance(), 4, [])
    both = [Drafting(4, RequestAcceptance(), is_compared=compared) for compared in (False, True)]
    for _ in range(20):
        shares = budget.shares(both)
        assert shares.num_drafts == [0, 4]
        assert shares.runs_drafter
    assert not any(budget.shares(both[:1]).num_drafts)
