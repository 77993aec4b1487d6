"""The choice of a step's drafts against trying all of them."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specray.engine.draft_budget.by_place import Floats, allocate

gains = st.lists(st.floats(0.02, 1.0), max_size=3).map(lambda row: sorted(row, reverse=True))


@given(st.lists(gains, min_size=1, max_size=4), st.floats(0.1, 2.0), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_no_other_choice_generates_more_tokens_per_second(
    rows: list[list[float]], step: float, per_draft: float, fixed: float
) -> None:
    def seconds(num_drafts: Floats, most: Floats) -> Floats:
        return step + per_draft * num_drafts + fixed * (most > 0)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = len(rows) + sum(sum(row[:count]) for row, count in zip(rows, counts, strict=True))
        return tokens / seconds(sum(counts), max(counts))

    chosen = allocate(rows, seconds, most_drafts=100)
    best = max(rate(counts) for counts in product(*(range(len(row) + 1) for row in rows)))
    assert rate(tuple(chosen)) >= best * (1 - 1e-9)


def test_a_request_that_accepts_more_gets_more() -> None:
    rows = [[0.9, 0.8, 0.7, 0.6], [0.3, 0.1, 0.05]]
    assert allocate(rows, lambda num_drafts, _: 1 + 0.2 * num_drafts, most_drafts=100) == [4, 0]


def test_drafts_that_cost_more_than_they_bring_are_not_bought() -> None:
    assert allocate([[0.5, 0.4]] * 8, lambda num_drafts, _: 8.0 + num_drafts, most_drafts=100) == [0] * 8


def test_a_bend_of_the_costs_is_looked_past() -> None:
    """The first draft alone does not pay, because calling the drafter costs; four do."""
    chosen = allocate([[0.9, 0.8, 0.7, 0.6]], lambda num_drafts, _: 1.0 + 1.2 * (num_drafts > 0), most_drafts=100)
    assert chosen == [4]


def test_one_request_with_a_long_certain_tree_does_not_keep_the_others_from_one_draft() -> None:
    """Levels cost time for all: the first draft of each pays, and the long tree does not."""
    rows = [[0.9] * 8] + [[0.7, 0.1]] * 15

    def seconds(num_drafts: Floats, most: Floats) -> Floats:
        return 16.0 + 0.3 * num_drafts + 2.0 * most

    assert allocate(rows, seconds, most_drafts=100) == [1] * 16
    assert allocate(rows[:1], lambda num_drafts, _: 16.0 + 0.3 * num_drafts, 100) == [8]


def test_the_limit_of_a_step_holds() -> None:
    chosen = allocate([[0.9, 0.8], [0.85, 0.1]], lambda num_drafts, _: np.ones_like(num_drafts), most_drafts=2)
    assert chosen == [1, 1]
