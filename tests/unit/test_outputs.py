"""Acceptance rates by depth, from a request's histogram of accepted drafts."""

import pytest

from specray.outputs import acceptance_per_depth, add_histograms


@pytest.mark.parametrize(
    ("histogram", "expected"),
    [
        ([], []),  # nothing was drafted
        ([7], [0.0]),  # nothing was accepted
        ([1, 0, 1], [0.5, 1.0]),
        ([2, 1, 1, 4], [6 / 8, 5 / 6, 4 / 5]),
    ],
)
def test_rates_are_given_that_the_parent_was_accepted(histogram: list[int], expected: list[float]) -> None:
    assert acceptance_per_depth(histogram) == pytest.approx(expected)


def test_accept_length_follows_from_the_rates() -> None:
    histogram = [5, 3, 0, 2]
    length, reached = 1.0, 1.0
    for share in acceptance_per_depth(histogram):
        reached *= share
        length += reached
    assert length == pytest.approx(1 + (3 * 1 + 2 * 3) / 10)


def test_histograms_of_different_lengths_add_up() -> None:
    assert add_histograms([(1, 2), (), (0, 1, 3)]) == [1, 3, 3]
    assert add_histograms([]) == []
