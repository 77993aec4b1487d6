"""The suffix index, compared with a linear search, and its capacity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from specray.spec_decode import ngram_index
from specray.spec_decode.ngram_index import GAP, Match, NgramKeys, SuffixIndex, num_levels

WINDOW, REACH = 6, 5
texts = st.lists(st.integers(1, 3) | st.just(GAP), max_size=60)
suffixes = st.lists(st.integers(1, 3), min_size=1, max_size=WINDOW)
LEVELS = range(num_levels(WINDOW))


def find(index: SuffixIndex, level: int, suffix: list[int]) -> list[tuple[int, Match]]:
    backwards = np.array(suffix[::-1] + [GAP] * (WINDOW - len(suffix)), dtype=np.int64)
    key = NgramKeys(len(LEVELS)).read(suffix)[level][-1]
    return list(index.find(level, key, backwards).items())


def search(text: list[int], capacity: int, level: int, suffix: list[int]) -> list[tuple[int, Match]]:
    """Matches of the last 2 ** level symbols of `suffix` in `text`, the latest first, by linear search."""
    stretch = 1 << level
    if len(suffix) < stretch:
        return []
    ends = [end for end in range(len(text) - 1) if text[max(0, end + 1 - stretch) : end + 1] == suffix[-stretch:]]
    found = []
    for end in ends[: -ngram_index.MOST_PLACES - 1 : -1]:
        length = max(n for n in range(1, len(suffix) + 1) if text[max(0, end + 1 - n) : end + 1] == suffix[-n:])
        follows = text[end + 1 : end + 1 + REACH]
        follows = follows[: follows.index(GAP)] if GAP in follows else follows
        if follows and end >= len(text) - capacity:
            found.append((end + 1, Match(length, follows)))  # place 0 means none
    return found


@given(texts, suffixes)
def test_the_index_equals_a_linear_search(text: list[int], suffix: list[int]) -> None:
    index = SuffixIndex(100, WINDOW, REACH)
    index.extend(text)
    assert len(index) == len(text)
    for level in LEVELS:
        assert find(index, level, suffix) == search(text, 100, level, suffix)


@given(texts)
def test_end_keys_find_matches_of_the_end(text: list[int]) -> None:
    index = SuffixIndex(100, WINDOW, REACH)
    index.extend(text)
    suffix = text[-WINDOW:]
    if not suffix or GAP in suffix:
        return
    backwards = np.array(suffix[::-1] + [GAP] * (WINDOW - len(suffix)), dtype=np.int64)
    for level in LEVELS:
        found = index.find(level, index.end_keys[level], backwards)
        assert list(found.items()) == search(text, 100, level, suffix)


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_only_the_last_symbols_within_the_capacity_are_found(capacity: int) -> None:
    class Stream(RuleBasedStateMachine):
        """Adds texts of any length and compares matches with a search of the last `capacity` symbols."""

        def __init__(self) -> None:
            super().__init__()
            self.index = SuffixIndex(capacity, WINDOW, REACH)
            self.text: list[int] = []

        @rule(text=st.lists(st.integers(1, 3), max_size=12))
        def extend(self, text: list[int]) -> None:
            piece = [*text, GAP][-capacity:]
            self.index.extend(piece)
            self.text += piece

        @rule(suffix=suffixes)
        def find(self, suffix: list[int]) -> None:
            for level in LEVELS:
                assert find(self.index, level, suffix) == search(self.text, capacity, level, suffix)

        @invariant()
        def counts(self) -> None:
            assert len(self.index) == len(self.text)

    run_state_machine_as_test(Stream, settings=settings(max_examples=15, stateful_step_count=20, deadline=None))


def test_the_end_of_a_text_longer_than_the_capacity_is_kept() -> None:
    index = SuffixIndex(10, WINDOW, REACH)
    index.extend([1, 2] * 20 + [3] * 4 + [1, 2, 3])
    assert [match.follows for _, match in find(index, 0, [2])] == [[3], [3, 3, 3, 3, 1], [1, 2, 3, 3, 3]]


def test_the_latest_matches_of_a_frequent_sequence_are_returned() -> None:
    index = SuffixIndex(1000, WINDOW, REACH)
    index.extend([1, 2, 1, 3] * 100)
    found = find(index, 0, [1])
    assert len(found) == ngram_index.MOST_PLACES
    assert min(place for place, _ in found) > 400 - 2 * ngram_index.MOST_PLACES - 2
