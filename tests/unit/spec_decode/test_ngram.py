"""NGRAM: whose words are drafted from, for how long, and which options go together."""

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
from tests.support.drafters import Tokens, make_context
from tests.support.engine import make_llm

MATCH_TYPES = ["BFS", "PROB", "SUFFIX"]


def make(num_draft_tokens: int | None = None, **options: Any) -> NgramDrafter:
    return NgramDrafter.of(SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=num_draft_tokens, **options))


def propose(drafter: NgramDrafter, tokens: list[int], slot: int = 0, num_prompt: int = 0, salt: str = "") -> TreeLists:
    [tree] = drafter.propose(make_context([Tokens(slot, tokens, num_prompt, salt)])).to_lists()
    return tree


def branches(tree: TreeLists) -> set[tuple[int, ...]]:
    """The token paths from below the root to every node."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return set(paths[1:])


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@given(texts, st.integers(2, 64))
def test_every_tree_is_sound_and_copies_the_request(match_type: str, tokens: list[int], num_draft_tokens: int) -> None:
    tree = propose(make(num_draft_tokens, ngram_match_type=match_type), tokens)
    assert tree.tokens[0] == tokens[-1]
    assert len(tree.tokens) <= num_draft_tokens
    assert DraftTree.from_lists([tree]).is_valid(vocab_size=4).all()
    assert len(branches(tree)) == len(tree.tokens) - 1  # equal siblings are merged
    for branch in branches(tree):
        seen = [tokens[-1], *branch]
        assert any(tokens[at : at + len(seen)] == seen for at in range(len(tokens)))


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@given(texts)
def test_what_is_drafted_does_not_depend_on_how_the_tokens_came(match_type: str, tokens: list[int]) -> None:
    drafter, known = make(ngram_match_type=match_type), 1
    while known < len(tokens):
        propose(drafter, tokens[:known])
        known += 1 + tokens[known] * 2
    assert propose(drafter, tokens) == propose(make(ngram_match_type=match_type), tokens)


def test_a_long_request_is_searched_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_LEAST_OWN_CAPACITY", 4)
    drafter, tokens = make(), [7, 8, 9]
    for token in [*range(20, 60), 7, 8]:
        tokens.append(token)
        tree = propose(drafter, tokens)
    assert tree.tokens == [8, 9, 20, 21, 22]


def test_the_longest_match_comes_first() -> None:
    #      four in common, then 7 8       two in common, then 9 9
    tokens = [1, 2, 3, 4, 7, 8, 0, 0, 5, 3, 4, 9, 9, 0, 0, 1, 2, 3, 4]
    tree = propose(make(), tokens)
    assert tree.tokens[:3] == [4, 7, 8]
    assert tree.parents[:3] == [NONE, 0, 1]
    assert len(tree.tokens) - 1 <= 2 * 4


def test_nothing_known_gives_a_bare_root() -> None:
    assert propose(make(), [7]) == TreeLists([7], [NONE])
    assert propose(make(), [1, 2, 3, 4]) == TreeLists([4], [NONE])


@pytest.mark.parametrize(
    ("options", "num_draft_tokens"),
    [
        ({}, 12),
        ({"ngram_max_match_window_size": 4}, 4),
        ({"ngram_max_match_window_size": 16}, 16),
        ({"ngram_max_match_window_size": 1}, 2),  # the root alone would draft nothing
        ({"ngram_max_trie_depth": 8}, 8),
        ({"ngram_max_trie_depth": 18}, 12),
        ({"ngram_max_match_window_size": 4, "num_draft_tokens": 9}, 9),
    ],
)
def test_num_draft_tokens_defaults_to_the_longest_match(options: dict[str, Any], num_draft_tokens: int) -> None:
    assert make(**options).max_draft_tokens == num_draft_tokens - 1


def test_trees_come_in_the_order_of_the_rows() -> None:
    requests = [Tokens(slot, [slot, 1, 2, slot, 1]) for slot in (9, 4, 7)]
    trees = make().propose(make_context(requests)).to_lists()
    assert [max(branches(tree), key=len)[:2] for tree in trees] == [(2, 9), (2, 4), (2, 7)]


# ---- what is learnt from others -------------------------------------------------------------------------------------

TEXT = [10, 11, 12, 13, 14, 15]


def taught(salt: str = "", num_prompt: int = 0, **options: Any) -> NgramDrafter:
    """A drafter that has seen a request with TEXT end in slot 0."""
    drafter = make(**options)
    propose(drafter, TEXT, num_prompt=num_prompt, salt=salt)
    drafter.release([0])
    return drafter


@pytest.mark.parametrize("match_type", MATCH_TYPES)
def test_outputs_of_ended_requests_draft_for_others(match_type: str) -> None:
    assert propose(taught(ngram_match_type=match_type), [1, 10, 11], slot=3).tokens == [11, 12, 13, 14, 15]


def test_of_prompts_only_the_end_is_learnt() -> None:
    """What an answer to the same words begins with; the rest of a prompt is searched by its own request only."""
    options: dict[str, Any] = {"ngram_max_match_window_size": 2, "num_draft_tokens": 12}
    assert propose(taught(num_prompt=5, **options), [1, 13]).tokens == [13, 14, 15]
    assert propose(taught(num_prompt=5, **options), [1, 12]).tokens == [12]


def test_a_running_request_teaches_nobody() -> None:
    drafter = make()
    propose(drafter, TEXT, slot=0)
    assert propose(drafter, [1, 10, 11], slot=1).tokens == [11]


@pytest.mark.parametrize("match_type", MATCH_TYPES)
@pytest.mark.parametrize(("teacher", "pupil"), [("a", "b"), ("a", ""), ("", "a")])
def test_no_text_of_one_salt_drafts_for_another(teacher: str, pupil: str, match_type: str) -> None:
    options: dict[str, Any] = {"ngram_match_type": match_type}
    assert propose(taught(teacher, **options), [1, 10, 11], salt=pupil).tokens == [11]
    assert propose(taught(teacher, **options), [1, 10, 11], salt=teacher).tokens == [11, 12, 13, 14, 15]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=12))
def test_a_salt_drafts_as_if_it_were_alone(ended: list[tuple[str, list[int]]]) -> None:
    everyone, alone = make(), make()
    for salt, text in ended:
        for drafter in (everyone, alone) if salt == "a" else (everyone,):
            propose(drafter, text, salt=salt)
            drafter.release([0])
    for query in ([0, 1], [1, 1], [2, 0]):
        assert propose(everyone, query, slot=1, salt="a") == propose(alone, query, slot=1, salt="a")
        for drafter in (everyone, alone):
            drafter._texts.clear()


def test_two_outputs_do_not_run_into_each_other() -> None:
    drafter = make()
    for text in ([1, 2, 3], [4, 5, 6]):
        propose(drafter, text)
        drafter.release([0])
    assert propose(drafter, [9, 2, 3]).tokens == [3]


def test_a_slot_used_again_knows_nothing_of_its_last_request() -> None:
    drafter = taught("a")
    assert propose(drafter, [1, 10, 11], salt="b").tokens == [11]
    drafter = taught(num_prompt=6)
    assert propose(drafter, [20, 21, 22, 20, 21]) == propose(make(), [20, 21, 22, 20, 21])


def test_a_slot_that_never_drafted_can_be_released() -> None:
    make().release([0, 5])


def test_what_was_learnt_longest_ago_is_forgotten_first_whoever_said_it() -> None:
    """1000 nodes are 55 branches of 18 tokens: seven texts of six, each with a gap behind, and most of an eighth."""
    drafter = make(ngram_capacity=1000)
    for number in range(9):
        propose(drafter, [100 * number + token for token in TEXT], salt=str(number % 2))
        drafter.release([0])
    known = []
    for number in range(9):
        tree = propose(drafter, [1, 100 * number + 10, 100 * number + 11], slot=1 + number, salt=str(number % 2))
        known.append(len(tree.tokens) > 1)
    assert known == [False] + [True] * 8


def test_text_said_again_is_not_forgotten() -> None:
    drafter = make(ngram_capacity=1000)
    for number in (0, 1, 2, 3, 4, 0, 5, 6, 7, 8):
        propose(drafter, [100 * number + token for token in TEXT])
        drafter.release([0])
    assert propose(drafter, [1, 10, 11]).tokens == [11, 12, 13, 14, 15]
    assert propose(drafter, [1, 110, 111], slot=1).tokens == [111]


def test_only_the_salts_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with a new salt in every request must not fill the memory."""
    monkeypatch.setattr(ngram, "_MOST_SALTS", 3)
    drafter = make()
    for salt in "abcad":
        propose(drafter, TEXT, salt=salt)
        drafter.release([0])
    assert list(drafter._salts) == ["c", "a", "d"]
    known = []
    for slot, salt in enumerate("dacb", start=1):
        known += [salt] * (len(propose(drafter, [1, 10, 11], slot=slot, salt=salt).tokens) > 1)
    assert known == ["d", "a", "c"]


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_options_that_contradict_each_other_say_what_to_change(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_speculative(SpeculativeConfig(algorithm="NGRAM", **options))
    assert all(part in str(caught.value) for part in said)


# ---- in an engine ---------------------------------------------------------------------------------------------------


def test_a_second_tenant_drafts_as_well_as_the_first(stories: Path) -> None:
    """The request that ended last was once proposed for again, and the next in its slot drafted from its text."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = [1, *([403, 407, 261, 378] * 6)]
    with make_llm(stories, speculative=SpeculativeConfig(algorithm="NGRAM")) as llm:
        runs = [llm.generate([prompt], params, cache_salt=salt)[0].choices[0] for salt in ("a", "b", "c")]
    assert len({tuple(run.token_ids) for run in runs}) == 1
    steps = [run.usage.num_verify_steps for run in runs if run.usage]
    assert steps == [steps[0]] * 3
    assert steps[0] < 59  # it does draft


def test_requests_that_follow_each_other_take_the_steps_they_take_alone(toy: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [[0, *([9, 8, 7, 6, 5] * 5)], [0, 20, 21, 22, 20, 21], [0, *range(10, 40)]]

    def steps(order: list[int]) -> dict[int, tuple[int, int]]:
        with make_llm(toy, speculative=SpeculativeConfig(algorithm="NGRAM")) as llm:
            runs = {i: llm.generate([prompts[i]], params, cache_salt=str(i))[0].choices[0] for i in order}
        return {i: (run.usage.num_verify_steps, run.usage.num_accepted) for i, run in runs.items() if run.usage}

    alone = steps([0]) | steps([1]) | steps([2])
    assert steps([0, 1, 2]) == steps([2, 1, 0]) == alone
