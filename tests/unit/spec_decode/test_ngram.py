"""NGRAM copies what followed the same words before: of the request itself, or of its own tenant's earlier outputs."""

from hypothesis import given
from hypothesis import strategies as st

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import NONE, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext
from specray.spec_decode.ngram import NgramDrafter


def make(num_draft_tokens: int = 8) -> NgramDrafter:
    return NgramDrafter(SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=num_draft_tokens))


def propose(drafter: NgramDrafter, tokens: list[int], num_prompt: int = 1, slot: int = 0, salt: str = "") -> RowTree:
    [tree] = drafter.propose(ProposeContext([DraftRow(slot, tokens, num_prompt, salt)])).rows()
    return tree


def branches(tree: RowTree) -> set[tuple[int, ...]]:
    """Every path of the tree below its root, as tokens."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree.tokens)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    return set(paths.values())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 12))
def test_a_tree_is_well_formed_small_enough_and_rooted_in_the_last_token(tokens: list[int], limit: int) -> None:
    drafter = make(limit)
    for known in range(1, len(tokens) + 1):
        tree = propose(drafter, tokens[:known])
        assert tree.tokens[0] == tokens[known - 1]
        assert tree.parents[0] == NONE
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents[1:], 1))
        assert len(tree.tokens) <= limit
        siblings = [(tree.parents[node], tree.tokens[node]) for node in range(1, len(tree.tokens))]
        assert len(set(siblings)) == len(siblings)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60))
def test_every_branch_followed_the_last_two_tokens_somewhere_before(tokens: list[int]) -> None:
    for branch in branches(propose(make(), tokens)) - {()}:
        seen = tokens[-2:] + list(branch)
        assert any(tokens[i : i + len(seen)] == seen for i in range(len(tokens)))


def test_a_repeated_passage_is_continued() -> None:
    assert (14, 15) in branches(propose(make(), [10, 11, 12, 13, 14, 15, 9, 10, 11, 12, 13]))


def test_nothing_is_proposed_where_nothing_was_seen() -> None:
    assert propose(make(), [1, 2, 3, 4]) == RowTree([4], [NONE])
    assert propose(make(), [1]) == RowTree([1], [NONE])


def test_different_continuations_become_branches() -> None:
    tree = propose(make(), [0, 1, 2, 5, 9, 0, 1, 2, 6, 8, 0, 1, 2])
    assert {(5,), (6,)} <= branches(tree)


def test_what_a_tenant_was_told_drafts_for_its_next_request_and_for_nobody_else() -> None:
    drafter = make()
    propose(drafter, [1, 20, 21, 22, 23], num_prompt=1, salt="tenant")
    drafter.release([0])
    assert (22, 23) in branches(propose(drafter, [3, 20, 21], slot=1, salt="tenant"))
    for other in ("", "another"):
        assert propose(drafter, [3, 20, 21], slot=2, salt=other) == RowTree([21], [NONE])
        drafter.release([2])


def test_prompts_are_not_shared() -> None:
    drafter = make()
    propose(drafter, [20, 21, 22, 23, 1], num_prompt=4)
    drafter.release([0])
    assert propose(drafter, [3, 20, 21], slot=1) == RowTree([21], [NONE])


def test_a_slot_used_again_knows_nothing_of_its_last_request() -> None:
    drafter = make()
    propose(drafter, [20, 21, 22, 23, 1], num_prompt=5)
    drafter.release([0])
    assert propose(drafter, [3, 20, 21]) == RowTree([21], [NONE])


def test_slots_that_never_drafted_can_be_released() -> None:
    make().release([0, 5])
