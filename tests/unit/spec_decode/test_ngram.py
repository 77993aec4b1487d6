"""NGRAM: matches within a request and in outputs of ended requests, isolation of salts, capacity and options."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.sampling_params import SamplingParams
from specray.spec_decode import check_speculative, ngram
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_rules import ngram_rules
from tests.support.drafters import Tokens, make_context, paths_of
from tests.support.engine import make_llm

MATCH_TYPES = ["BFS", "PROB", "SUFFIX"]


def make(num_draft_tokens: int | None = None, **options: Any) -> NgramDrafter:
    return NgramDrafter(ngram_rules(SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=num_draft_tokens, **options)))


def propose(drafter: NgramDrafter, tokens: list[int], slot: int = 0, num_prompt: int = 0, salt: str = "") -> TreeLists:
    [tree] = drafter.propose(make_context([Tokens(slot, tokens, num_prompt, salt)])).to_lists()
    return tree


def branches(tree: TreeLists) -> set[tuple[int, ...]]:
    """The distinct token paths from below the root to every node."""
    return set(paths_of(tree))


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@given(texts, st.integers(2, 64))
def test_every_branch_occurs_in_the_request(match_type: str, tokens: list[int], num_draft_tokens: int) -> None:
    tree = propose(make(num_draft_tokens, ngram_match_type=match_type), tokens)
    assert tree.tokens[0] == tokens[-1]
    assert len(tree.tokens) <= num_draft_tokens
    assert DraftTree.from_lists([tree]).is_valid(vocab_size=4).all()
    assert len(branches(tree)) == len(tree.tokens) - 1  # equal siblings are merged
    for branch in branches(tree):
        continuation = [tokens[-1], *branch]
        assert any(tokens[at : at + len(continuation)] == continuation for at in range(len(tokens)))


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@given(texts)
def test_drafts_do_not_depend_on_the_steps_in_which_tokens_arrived(match_type: str, tokens: list[int]) -> None:
    drafter, known = make(ngram_match_type=match_type), 1
    while known < len(tokens):
        propose(drafter, tokens[:known])
        known += 1 + tokens[known] * 2
    assert propose(drafter, tokens) == propose(make(ngram_match_type=match_type), tokens)


def test_all_of_a_long_request_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_LEAST_OWN_CAPACITY", 4)
    drafter, tokens = make(), [7, 8, 9]
    for token in [*range(20, 60), 7, 8]:
        tokens.append(token)
        tree = propose(drafter, tokens)
    assert tree.tokens == [8, 9, 20, 21, 22]


def test_the_longest_match_comes_first() -> None:
    #      a match of four, then 7 8      a match of two, then 9 9
    tokens = [1, 2, 3, 4, 7, 8, 0, 0, 5, 3, 4, 9, 9, 0, 0, 1, 2, 3, 4]
    tree = propose(make(), tokens)
    assert tree.tokens[:3] == [4, 7, 8]
    assert tree.parents[:3] == [NONE, 0, 1]
    assert len(tree.tokens) - 1 <= 2 * 4


def test_without_a_match_only_the_root_is_returned() -> None:
    assert propose(make(), [7]) == TreeLists([7], [NONE])
    assert propose(make(), [1, 2, 3, 4]) == TreeLists([4], [NONE])


@pytest.mark.parametrize(
    ("options", "num_draft_tokens"),
    [
        ({}, 12),
        ({"ngram_max_match_window_size": 4}, 4),
        ({"ngram_max_match_window_size": 16}, 16),
        ({"ngram_max_match_window_size": 1}, 2),  # 1 would leave no room for drafts
        ({"ngram_max_trie_depth": 8}, 8),
        ({"ngram_max_trie_depth": 18}, 12),
        ({"ngram_max_match_window_size": 4, "num_draft_tokens": 9}, 9),
    ],
)
def test_num_draft_tokens_defaults_to_the_match_window(options: dict[str, Any], num_draft_tokens: int) -> None:
    assert make(**options).max_draft_tokens == num_draft_tokens - 1


def test_trees_are_in_the_order_of_the_requests() -> None:
    requests = [Tokens(slot, [slot, 1, 2, slot, 1]) for slot in (9, 4, 7)]
    trees = make().propose(make_context(requests)).to_lists()
    assert [max(branches(tree), key=len)[:2] for tree in trees] == [(2, 9), (2, 4), (2, 7)]


# ---- outputs of ended requests --------------------------------------------------------------------------------------

TEXT = [10, 11, 12, 13, 14, 15]


def drafter_with_text(salt: str = "", num_prompt: int = 0, **options: Any) -> NgramDrafter:
    """A drafter after the end of a request with TEXT in slot 0."""
    drafter = make(**options)
    propose(drafter, TEXT, num_prompt=num_prompt, salt=salt)
    drafter.release([0])
    return drafter


@pytest.mark.parametrize("match_type", MATCH_TYPES)
def test_outputs_of_ended_requests_are_used_for_others(match_type: str) -> None:
    assert propose(drafter_with_text(ngram_match_type=match_type), [1, 10, 11], slot=3).tokens == [11, 12, 13, 14, 15]


def test_only_the_end_of_a_prompt_is_kept() -> None:
    """The end of the prompt is needed to match the beginning of the output."""
    options: dict[str, Any] = {"ngram_max_match_window_size": 2, "num_draft_tokens": 12}
    assert propose(drafter_with_text(num_prompt=5, **options), [1, 13]).tokens == [13, 14, 15]
    assert propose(drafter_with_text(num_prompt=5, **options), [1, 12]).tokens == [12]


def test_running_requests_are_not_used_for_others() -> None:
    drafter = make()
    propose(drafter, TEXT, slot=0)
    assert propose(drafter, [1, 10, 11], slot=1).tokens == [11]


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@pytest.mark.parametrize(("salt", "other"), [("a", "b"), ("a", ""), ("", "a")])
def test_salts_share_no_text(salt: str, other: str, match_type: str) -> None:
    options: dict[str, Any] = {"ngram_match_type": match_type}
    assert propose(drafter_with_text(salt, **options), [1, 10, 11], salt=other).tokens == [11]
    assert propose(drafter_with_text(salt, **options), [1, 10, 11], salt=salt).tokens == [11, 12, 13, 14, 15]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=12))
def test_drafts_of_a_salt_do_not_depend_on_other_salts(ended: list[tuple[str, list[int]]]) -> None:
    shared, alone = make(), make()
    for salt, text in ended:
        for drafter in (shared, alone) if salt == "a" else (shared,):
            propose(drafter, text, salt=salt)
            drafter.release([0])
    for query in ([0, 1], [1, 1], [2, 0]):
        assert propose(shared, query, slot=1, salt="a") == propose(alone, query, slot=1, salt="a")
        for drafter in (shared, alone):
            drafter._texts.clear()


def test_no_match_spans_two_outputs() -> None:
    drafter = make()
    for text in ([1, 2, 3], [4, 5, 6]):
        propose(drafter, text)
        drafter.release([0])
    assert propose(drafter, [9, 2, 3]).tokens == [3]


def test_a_reused_slot_does_not_use_the_text_of_its_last_request() -> None:
    drafter = drafter_with_text("a")
    assert propose(drafter, [1, 10, 11], salt="b").tokens == [11]
    drafter = drafter_with_text(num_prompt=6)
    assert propose(drafter, [20, 21, 22, 20, 21]) == propose(make(), [20, 21, 22, 20, 21])


def test_a_slot_that_never_drafted_can_be_released() -> None:
    make().release([0, 5])


def test_the_oldest_text_of_any_salt_is_dropped_first() -> None:
    """1000 nodes are 55 branches of 18 tokens: seven texts of six tokens and a gap each, and most of an eighth."""
    drafter = make(ngram_capacity=1000)
    for number in range(9):
        propose(drafter, [100 * number + token for token in TEXT], salt=str(number % 2))
        drafter.release([0])
    has_match = []
    for number in range(9):
        tree = propose(drafter, [1, 100 * number + 10, 100 * number + 11], slot=1 + number, salt=str(number % 2))
        has_match.append(len(tree.tokens) > 1)
    assert has_match == [False] + [True] * 8


def test_repeated_text_is_kept() -> None:
    drafter = make(ngram_capacity=1000)
    for number in (0, 1, 2, 3, 4, 0, 5, 6, 7, 8):
        propose(drafter, [100 * number + token for token in TEXT])
        drafter.release([0])
    assert propose(drafter, [1, 10, 11]).tokens == [11, 12, 13, 14, 15]
    assert propose(drafter, [1, 110, 111], slot=1).tokens == [111]


def test_only_the_most_recently_used_salts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """This bounds memory if every request has a new salt."""
    monkeypatch.setattr(ngram, "_MOST_SALTS", 3)
    drafter = make()
    for salt in "abcad":
        propose(drafter, TEXT, salt=salt)
        drafter.release([0])
    assert list(drafter._salts) == ["c", "a", "d"]
    matched = []
    for slot, salt in enumerate("dacb", start=1):
        matched += [salt] * (len(propose(drafter, [1, 10, 11], slot=slot, salt=salt).tokens) > 1)
    assert matched == ["d", "a", "c"]


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ngram_min_match_window_size": 5, "ngram_max_match_window_size": 4}, ["=5 is more than", "=4", "lower"]),
        ({"ngram_min_bfs_breadth": 11}, ["ngram_min_bfs_breadth=11", "=10", "lower"]),
        ({"ngram_branch_length": 12}, ["ngram_max_match_window_size=12", "ngram_branch_length=12", "at least 13"]),
        ({"ngram_max_trie_depth": 8, "ngram_branch_length": 9}, ["ngram_branch_length=9", "=8", "remove one"]),
        ({"ngram_max_trie_depth": 8, "ngram_max_match_window_size": 4}, ["ngram_max_match_window_size=4", "=8"]),
        ({"ngram_match_type": "PROB", "ngram_min_bfs_breadth": 2}, ["ngram_min_bfs_breadth=2", "PROB", "BFS"]),
        ({"ngram_match_type": "SUFFIX", "ngram_max_bfs_breadth": 2}, ["ngram_max_bfs_breadth=2", "BFS or PROB"]),
        ({"ngram_min_token_prob": 0.2}, ["ngram_min_token_prob=0.2", "BFS", "SUFFIX"]),
    ],
)
def test_contradicting_options_are_refused_with_the_fix(options: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_speculative(SpeculativeConfig(algorithm="NGRAM", **options))
    assert all(part in str(caught.value) for part in expected)


# ---- in an engine ---------------------------------------------------------------------------------------------------


def test_acceptance_of_a_second_tenant_equals_that_of_the_first(stories: Path) -> None:
    """Regression: the last ended request was drafted for again, and the next one in its slot used its text."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = [1, *([403, 407, 261, 378] * 6)]
    with make_llm(stories, speculative=SpeculativeConfig(algorithm="NGRAM")) as llm:
        runs = [llm.generate([prompt], params, cache_salt=salt)[0].choices[0] for salt in ("a", "b", "c")]
    assert len({tuple(run.token_ids) for run in runs}) == 1
    steps = [run.usage.num_verify_steps for run in runs if run.usage]
    assert steps == [steps[0]] * 3
    assert steps[0] < 59  # drafts are accepted


def test_earlier_requests_of_other_salts_do_not_change_the_number_of_steps(toy: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [[0, *([9, 8, 7, 6, 5] * 5)], [0, 20, 21, 22, 20, 21], [0, *range(10, 40)]]

    def steps(order: list[int]) -> dict[int, tuple[int, int]]:
        with make_llm(toy, speculative=SpeculativeConfig(algorithm="NGRAM")) as llm:
            runs = {i: llm.generate([prompts[i]], params, cache_salt=str(i))[0].choices[0] for i in order}
        return {i: (run.usage.num_verify_steps, run.usage.num_accepted) for i, run in runs.items() if run.usage}

    alone = steps([0]) | steps([1]) | steps([2])
    assert steps([0, 1, 2]) == steps([2, 1, 0]) == alone
