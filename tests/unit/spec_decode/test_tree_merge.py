"""Merged trees: the union of the paths, parents first, the likeliest nodes; and what calibrations learn from texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.ngram_index import Match
from specray.spec_decode.ngram_tree import grow_matches, ngram_evidence
from specray.spec_decode.tree_merge import MEMORY_NODES, Calibration, FollowedShare, Proposal, Rate, ScoredLists, merge
from tests.support.drafters import chain, paths_of

ROOT_TOKEN, VOCAB, MOST = 9, 4, 60


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    size = draw(st.integers(0, 12))
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in range(size)]
    parents = [draw(st.integers(0, node)) for node in range(size)]
    evidence = [draw(st.integers(0, 9)) for _ in range(size)]
    return Proposal("a source", TreeLists([ROOT_TOKEN, *tokens], [NONE, *parents]), [0, *evidence])


def rate(evidence: int) -> float:
    return (1 + evidence) / 10


def merged(parts: list[Proposal], most: int = MOST, max_depth: int = MOST, least: float = 0.0) -> ScoredLists:
    return merge([(part, rate) for part in parts], ROOT_TOKEN, most, max_depth, least)


def depths(tree: TreeLists) -> list[int]:
    return [0, *map(len, paths_of(tree))]


some_proposals = st.lists(proposals(), max_size=4)


@given(some_proposals)
def test_the_paths_are_the_union_of_those_of_all_sources(parts: list[Proposal]) -> None:
    tree, scores = merged(parts)
    paths = paths_of(tree)
    assert set(paths) == {path for part in parts for path in paths_of(part.tree)}
    assert len(paths) == len(set(paths)) == len(scores) - 1


@given(some_proposals, st.integers(0, 20), st.integers(0, 5), st.sampled_from([0.0, 0.3]))
def test_parents_come_first_and_the_limits_hold(parts: list[Proposal], most: int, deepest: int, least: float) -> None:
    tree, scores = merged(parts, most, deepest, least)
    assert DraftTree.from_lists([tree]).is_valid(VOCAB + ROOT_TOKEN).all()
    assert len(tree.tokens) <= 1 + most
    assert max(depths(tree)) <= deepest
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0
    assert min(scores) >= least


@given(some_proposals, st.integers(0, 20))
def test_the_likeliest_nodes_are_kept(parts: list[Proposal], most: int) -> None:
    """No node that was left out has a higher score than one that was kept."""
    every, few = merged(parts), merged(parts, most)
    assert few.scores == every.scores[: 1 + most]
    assert paths_of(few.tree) == paths_of(every.tree)[:most]


@given(some_proposals)
def test_the_chances_of_siblings_sum_to_one_at_most(parts: list[Proposal]) -> None:
    tree, scores = merged(parts)
    for node, score in enumerate(scores):
        below = [scores[child] for child, parent in enumerate(tree.parents) if parent == node]
        assert sum(below) <= score + 1e-9


def test_a_node_of_two_sources_has_the_better_rate() -> None:
    first, second = (Proposal("x", chain(ROOT_TOKEN, [1, 2]), [0, own, 9]) for own in (2, 6))
    assert merged([first, second]) == ScoredLists(chain(ROOT_TOKEN, [1, 2]), [1.0, 0.7, 0.7])


def single_path(*evidence: int) -> Proposal:
    """root -> 0 -> 1 -> 2 and so on."""
    size = len(evidence)
    return Proposal("x", TreeLists([ROOT_TOKEN, *range(size)], [NONE, *range(size)]), [0, *evidence])


def test_a_calibration_learns_the_share_of_nodes_that_follow() -> None:
    learned = Calibration(lambda _: 0.9)
    for number in range(400):
        learned.observe(single_path(3), [0 if number % 4 == 0 else 1], FollowedShare())
    assert learned.rate_of(FollowedShare())(3) == pytest.approx(0.25, abs=0.02)
    assert learned.rate_of(FollowedShare())(4) == 0.9
    for _ in range(8 * MEMORY_NODES):
        learned.observe(single_path(3), [0], FollowedShare())
    assert learned.rate_of(FollowedShare())(3) > 0.97, "what is old counts less"


def test_a_request_whose_text_followed_a_source_expects_more_of_it_than_others() -> None:
    """Nine requests in ten follow nothing; the tenth repeats a text."""
    learned, expected = Calibration(lambda _: 0.5), []
    for number in range(100):
        share = FollowedShare()
        assert share.share_class == FollowedShare().share_class
        for _ in range(20):
            learned.observe(single_path(3), [0 if number % 10 == 0 else 1], share)
        expected.append(learned.rate_of(share)(3))
    assert all(rate < 0.05 for rate in expected[51:60])
    assert expected[60] > 0.8
    assert 0.05 < learned.rate_of(FollowedShare())(3) < 0.5, "of a request of which nothing is known"


def test_only_nodes_whose_parents_are_in_the_text_are_counted() -> None:
    """root -> 1 -> 2 -> 3
    \\-> 5 -> 6"""
    tree = Proposal("x", TreeLists([ROOT_TOKEN, 1, 2, 3, 5, 6], [NONE, 0, 1, 2, 0, 4]), [0, 1, 2, 3, 4, 5])

    def changes(text: list[int]) -> list[int]:
        """By evidence: 1 if its rate rises, -1 if it falls, 0 if nothing was counted."""
        learned = Calibration(lambda _: 0.5)
        learned.observe(tree, text, FollowedShare())
        rate = learned.rate_of(FollowedShare())
        return [(rate(evidence) > 0.5) - (rate(evidence) < 0.5) for evidence in range(1, 6)]

    assert changes([1, 2]) == [1, 1, 0, -1, 0], "of node 3 it is not known"
    assert changes([1, 9, 3]) == [1, -1, 0, -1, 0]


def grown(
    matches: list[Match], most: int = MOST, rate: Rate = lambda _: 0.9
) -> tuple[list[tuple[int, ...]], list[int]]:
    tree, evidence = grow_matches(matches, rate, most)
    return paths_of(tree), evidence[1:]


def test_n_grams_say_how_long_their_matches_are_and_whether_texts_agree() -> None:
    paths, evidence = grown([Match(5, [1, 2, 3]), Match(2, [1, 2, 4]), Match(1, [7])])
    assert paths == [(1,), (7,), (1, 2), (1, 2, 3), (1, 2, 4)]
    agreed, other = ngram_evidence(6, 2, 1, 0), ngram_evidence(1, 1, 2, 1)
    assert evidence == [
        ngram_evidence(5, 2, 2, 0),
        other,
        agreed,
        ngram_evidence(7, 1, 2, 0),
        ngram_evidence(4, 1, 2, 1),
    ]


def test_n_gram_trees_are_bounded_and_leave_out_what_is_never_right() -> None:
    matches = [Match(3, [token] * 9) for token in range(20)]
    assert len(grown(matches, most=5)[0]) == 5
    assert grown(matches, rate=lambda _: 0.001)[0] == []
