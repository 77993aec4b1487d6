"""NGRAM: the index against a search by hand, the merged tree, and who may learn from whom."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.config import SpeculativeConfig
from specray.sampling_params import SamplingParams
from specray.spec_decode import ngram
from specray.spec_decode.draft_tree import NONE, RowTree
from specray.spec_decode.drafter import ProposeContext
from specray.spec_decode.ngram import NgramDrafter, SuffixIndex
from tests.support.drafters import draft_row
from tests.support.engine import make_llm

GAP = -2
texts = st.lists(st.integers(0, 3) | st.just(GAP), max_size=60)
suffixes = st.lists(st.integers(0, 3), min_size=2, max_size=12)


def search(text: list[int], suffix: list[int]) -> list[tuple[int, list[int]]]:
    """What an index of `text` should find: the eight last places that end like `suffix`, the last first."""
    ends = [end for end in range(1, len(text)) if text[end - 1 : end + 1] == suffix[-2:]]
    found = []
    for end in ends[:-9:-1]:
        length = max(n for n in range(2, len(suffix) + 1) if text[max(0, end + 1 - n) : end + 1] == suffix[-n:])
        follows = text[end + 1 : end + 1 + 2 * length]
        follows = follows[: follows.index(GAP)] if GAP in follows else follows
        if follows:
            found.append((length, follows))
    return found


@given(texts, suffixes)
def test_the_index_finds_what_a_search_finds(text: list[int], suffix: list[int]) -> None:
    index = SuffixIndex()
    index.extend(text)
    assert list(index.matches(suffix)) == search(text, suffix)


@given(st.lists(texts, max_size=5), suffixes)
def test_a_text_may_come_in_pieces(pieces: list[list[int]], suffix: list[int]) -> None:
    index, whole = SuffixIndex(), [token for piece in pieces for token in piece]
    for piece in pieces:
        index.extend(piece)
    assert index.num_tokens == len(whole)
    assert list(index.matches(suffix)) == search(whole, suffix)


@pytest.mark.parametrize("suffix", [[], [1]])
def test_less_than_two_tokens_match_nothing(suffix: list[int]) -> None:
    index = SuffixIndex()
    index.extend([1, 1, 1, 1])
    assert list(index.matches(suffix)) == []


@given(st.lists(texts, max_size=8), st.integers(4, 40), suffixes)
def test_a_full_index_forgets_its_oldest_text(pieces: list[list[int]], capacity: int, suffix: list[int]) -> None:
    index, whole = SuffixIndex(capacity), [token for piece in pieces for token in piece]
    for piece in pieces:
        index.extend(piece)
        assert index.num_tokens <= capacity
    assert index.num_tokens >= min(len(whole), capacity // 2)
    assert list(index.matches(suffix)) == search(whole[len(whole) - index.num_tokens :], suffix)


# ---- the drafter ----------------------------------------------------------------------------------------------------


def make(num_draft_tokens: int | None = None) -> NgramDrafter:
    return NgramDrafter(SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=num_draft_tokens))


def propose(drafter: NgramDrafter, tokens: list[int], slot: int = 0, num_prompt: int = 0, salt: str = "") -> RowTree:
    [tree] = drafter.propose(ProposeContext([draft_row(slot, tokens, num_prompt, salt)])).rows()
    return tree


def branches(tree: RowTree) -> set[tuple[int, ...]]:
    """The token paths from below the root to every node."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return set(paths[1:])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 64))
def test_every_tree_is_sound_and_copies_the_request(tokens: list[int], num_draft_tokens: int) -> None:
    tree = propose(make(num_draft_tokens), tokens)
    assert tree.tokens[0] == tokens[-1]
    assert len(tree.tokens) <= num_draft_tokens
    assert tree.or_root(vocab_size=4) is tree
    assert len(branches(tree)) == len(tree.tokens) - 1  # equal siblings are merged
    for branch in branches(tree):
        seen = [*tokens[-2:], *branch]
        assert any(tokens[at : at + len(seen)] == seen for at in range(len(tokens)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_what_is_drafted_does_not_depend_on_how_the_tokens_came(tokens: list[int]) -> None:
    drafter, known = make(), 1
    while known < len(tokens):
        propose(drafter, tokens[:known])
        known += 1 + tokens[known] * 2
    assert propose(drafter, tokens) == propose(make(), tokens)


def test_the_longest_match_comes_first() -> None:
    #      four in common, then 7 8       two in common, then 9 9
    tokens = [1, 2, 3, 4, 7, 8, 0, 0, 5, 3, 4, 9, 9, 0, 0, 1, 2, 3, 4]
    tree = propose(make(), tokens)
    assert tree.tokens[:3] == [4, 7, 8]
    assert tree.parents[:3] == [NONE, 0, 1]
    assert len(tree.tokens) - 1 <= 2 * 4


def test_a_short_match_earns_few_drafts() -> None:
    assert propose(make(64), [1, 2, 5, 6, 7, 8, 9, 3, 1, 2]).tokens == [2, 5, 6, 7, 8]


def test_continuations_that_begin_alike_share_their_nodes() -> None:
    tree = propose(make(64), [1, 2, 5, 6, 0, 1, 2, 5, 7, 0, 1, 2])
    assert branches(tree) == {(5,), (5, 7), (5, 7, 0), (5, 7, 0, 1), (5, 7, 0, 1, 2), (5, 6)}


def test_nothing_known_gives_a_bare_root() -> None:
    assert propose(make(), [7]) == RowTree([7], [NONE])
    assert propose(make(), [1, 2, 3, 4]) == RowTree([4], [NONE])


def test_trees_come_in_the_order_of_the_rows() -> None:
    rows = [draft_row(slot, [slot, 1, 2, slot, 1]) for slot in (9, 4, 7)]
    trees = make().propose(ProposeContext(rows)).rows()
    assert [max(branches(tree), key=len)[:2] for tree in trees] == [(2, 9), (2, 4), (2, 7)]


# ---- what is learnt from others -------------------------------------------------------------------------------------

TEXT = [10, 11, 12, 13, 14, 15]


def taught(salt: str = "", num_prompt: int = 0) -> NgramDrafter:
    """A drafter that has seen a request with TEXT end in slot 0."""
    drafter = make()
    propose(drafter, TEXT, num_prompt=num_prompt, salt=salt)
    drafter.release([0])
    return drafter


def test_outputs_of_ended_requests_draft_for_others() -> None:
    assert propose(taught(), [1, 10, 11], slot=3).tokens == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("num_prompt", [1, 3, 6])
def test_prompts_are_not_learnt(num_prompt: int) -> None:
    assert propose(taught(num_prompt=num_prompt), [1, 10, 11]).tokens == [11]


def test_a_running_request_teaches_nobody() -> None:
    drafter = make()
    propose(drafter, TEXT, slot=0)
    assert propose(drafter, [1, 10, 11], slot=1).tokens == [11]


@pytest.mark.parametrize(("teacher", "pupil"), [("a", "b"), ("a", ""), ("", "a")])
def test_no_text_of_one_salt_drafts_for_another(teacher: str, pupil: str) -> None:
    assert propose(taught(teacher), [1, 10, 11], salt=pupil).tokens == [11]
    assert propose(taught(teacher), [1, 10, 11], salt=teacher).tokens == [11, 12, 13, 14, 15]


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


def test_only_the_salts_taught_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with a new salt in every request must not fill the memory."""
    monkeypatch.setattr(ngram, "_SALTS", 3)
    drafter = make()
    for salt in "abcad":
        propose(drafter, TEXT, salt=salt)
        drafter.release([0])
    known = []
    for slot, salt in enumerate("abcd", start=1):
        known += [salt] * (len(propose(drafter, [1, 10, 11], slot=slot, salt=salt).tokens) > 1)
    assert known == ["a", "c", "d"]


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
