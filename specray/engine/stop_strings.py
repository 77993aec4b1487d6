"""Stop strings: where a text is cut, and what must be held back while it may be about to contain one.

They act on the answer alone, which begins after the reasoning.

Each stop string is followed by its Knuth-Morris-Pratt automaton, so a character costs a few operations per stop string,
however long and alike the strings are.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from specray.sampling_params import ReasoningMarks, SamplingParams


def cut_at_stop(text: str, num_new: int, params: SamplingParams) -> tuple[str, str] | None:
    """(`text` up to the first stop string that ends in its last `num_new` characters, that string); None without."""
    matches = []
    for stop in params.stop:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0:
            matches.append((start, len(stop), stop))
    if not matches:
        return None
    start, length, stop = min(matches)
    return text[: start + (length if params.include_stop_str_in_output else 0)], stop


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


class AnswerStart:
    """Finds where an output's reasoning ends and its answer begins. Without `marks`, all of it is answer."""

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self.is_answer = marks is None  # it has begun
        self._start, ends, self.has_reasoning = marks or ("", ("",), False)
        self._ends = re.compile("|".join(map(re.escape, ends)))
        self._num_kept = max(map(len, ends)) - 1  # characters that may be the start of an end
        self._undecided = ""  # text that may be about to contain a mark

    def feed(self, text: str) -> str:
        """The part of the text so far that is now known to be answer. Called until the answer has begun."""
        self._undecided += text
        if not self.has_reasoning:
            first = self._undecided.lstrip()
            if self._start.startswith(first) and first != self._start:
                return ""
            self.has_reasoning = first.startswith(self._start)
            self.is_answer = not self.has_reasoning
            if self.is_answer:
                return self._undecided
        if end := self._ends.search(self._undecided):
            self.is_answer = True
            return self._undecided[end.end() :]
        self._undecided = self._undecided[-self._num_kept :]
        return ""


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
