"""Stop strings that a text may be about to contain: what must be held back until it is known.

Each stop string is followed by its Knuth-Morris-Pratt automaton, so a character costs a few operations per stop string,
however long and alike the strings are.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopPrefixes:
    """The longest end of a text that is the start of a stop string, without being all of it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string at the text's end

    def feed(self, text: str) -> None:
        """Append to the text."""
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            for char in text:
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    matched = borders[-1]
            self._matched[index] = matched

    @property
    def num_held(self) -> int:
        """Characters at the text's end that may be the start of a stop string."""
        return max(self._matched, default=0)


@lru_cache(maxsize=512)
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = borders[length - 1]
        length += text[length] == text[index]
        borders[index] = length
    return tuple(borders)
