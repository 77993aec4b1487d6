"""The text held back for stop strings."""

from hypothesis import given
from hypothesis import strategies as st

from specray.engine.stop_strings import StopPrefixes

WORDS = st.text("ab", min_size=1, max_size=6)


def longest_start_of_a_stop(text: str, stops: list[str]) -> int:
    lengths = range(len(text) + 1)
    return max(n for n in lengths if n == 0 or any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stops))


@given(st.lists(WORDS, max_size=5), st.lists(st.text("ab", max_size=4), max_size=8))
def test_what_is_held_is_the_longest_start_of_a_stop_string(stops: list[str], parts: list[str]) -> None:
    prefixes, text = StopPrefixes(stops), ""
    for part in parts:
        prefixes.feed(part)
        text += part
        assert prefixes.num_held == longest_start_of_a_stop(text, stops)
