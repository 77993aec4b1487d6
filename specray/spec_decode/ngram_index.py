"""An index of earlier occurrences of the last symbols of a text.

A trie of all n-grams would need as many nodes per token as it is deep, so no trie is stored. A node of that trie is
represented by the list of places where its n-gram ends, and its children are the symbols that follow there, the most
recent first. The places are found as in zlib: n-grams of 1, 2, 4, 8, … symbols are hashed, and each place is linked to
the previous one with the same hash. Symbols are numbers above 0; `GAP` separates texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GAP = 0  # also the content of unused memory
MOST_PLACES = 16  # most recent places of an n-gram that are examined
_MOST_STEPS = 4 * MOST_PLACES  # along a chain, which other n-grams may share


class Match(NamedTuple):
    """A place that ends with the symbols searched for."""

    length: int  # number of matching symbols
    follows: list[int]  # symbols after it, up to the end of its text


class SuffixIndex:
    """The last `capacity` symbols of a stream, searched for matches of up to `window` symbols; `reach` follow each.

    Memory grows with use, up to 8 bytes per symbol of capacity and 20 to 28 for each of the `num_levels(window)`.
    """

    def __init__(self, capacity: int, window: int, reach: int) -> None:
        levels = num_levels(window)
        self.capacity = capacity
        self.end_keys: list[int] = [0] * levels  # of the n-grams that end with the last symbol
        self._window = window
        self._size = size = capacity + window + 1  # a match may begin before what is kept; a gap follows the end
        self._around = np.arange(1 - window, reach + 1)
        self._symbols = np.zeros(size, dtype=np.int64)
        self._end = 1  # place of the next symbol, counted from the start of the stream; place 0 means none
        self._shift = _KEY_BITS - capacity.bit_length()
        self._keys = NgramKeys(levels)
        # Lists, because numpy is slow at single elements.
        self._symbol_view = self._symbols.data
        self._tags = [np.zeros(size, dtype=np.uint32).data for _ in range(levels)]
        self._previous = [np.zeros(size, dtype=np.int64).data for _ in range(levels)]
        self._latest = [np.zeros(1 << capacity.bit_length(), dtype=np.int64).data for _ in range(levels)]

    def __len__(self) -> int:
        """Symbols seen so far, including forgotten ones."""
        return self._end - 1

    def extend(self, symbols: Sequence[int]) -> None:
        """Append `symbols`."""
        new = symbols[-self.capacity :]
        if not new:
            return
        places = range(self._end, self._end + len(new))
        slots = [place % self._size for place in places]
        for slot, symbol in zip(slots, new, strict=True):
            self._symbol_view[slot] = symbol
        levels = self._keys.read(new)
        for keys, tags, previous, latest in zip(levels, self._tags, self._previous, self._latest, strict=True):
            for key, place, slot in zip(keys, places, slots, strict=True):
                bucket = key >> self._shift
                tags[slot] = key >> 8 & _TAG
                previous[slot] = latest[bucket]
                latest[bucket] = place
        self.end_keys = [keys[-1] for keys in levels]
        self._end += len(new)
        self._symbol_view[self._end % self._size] = GAP

    def find(self, level: int, key: int, suffix: NDArray[np.int64]) -> dict[int, Match]:
        """The most recent places, latest first, whose last 2 ** level symbols have `key`.

        `suffix` [window] has the symbols searched for, the last one first, padded with GAP.
        """
        places = self._walk(level, key)
        if not places:
            return {}
        slots = np.array(places) % self._size
        around = self._symbols.take(slots[:, None] + self._around, mode="wrap")
        same = (around[:, self._window - 1 :: -1] == suffix) & (suffix != GAP)
        lengths = np.logical_and.accumulate(same, axis=1).sum(1).tolist()
        follows = around[:, self._window :].tolist()
        found = zip(places, lengths, follows, strict=True)
        return {place: Match(length, _text(row)) for place, length, row in found if length >= 1 << level and row[0]}

    def _walk(self, level: int, key: int) -> list[int]:
        tags, previous = self._tags[level], self._previous[level]
        tag = key >> 8 & _TAG
        oldest, last, size = max(1, self._end - self.capacity), self._end - 1, self._size
        place = self._latest[level][key >> self._shift]
        found: list[int] = []
        for _ in range(_MOST_STEPS):
            if place < oldest or len(found) == MOST_PLACES:
                break
            slot = place % size
            if tags[slot] == tag and place != last:
                found.append(place)
            place = previous[slot]
        return found


def num_levels(window: int) -> int:
    """Lengths 1, 2, 4, … that are hashed for matches of up to `window` symbols."""
    return window.bit_length()


class NgramKeys:
    """Hashes of the n-grams of 1, 2, 4, … symbols that end at each place of a stream, `_KEY_BITS` bits each."""

    def __init__(self, levels: int) -> None:
        # The last keys of each level but the longest: a key of the next level combines two of them.
        self._last = [[0] * (1 << level) for level in range(levels - 1)]

    def read(self, symbols: Sequence[int]) -> list[list[int]]:
        """The keys of each level at the next `symbols`; none where a level's n-gram is longer than the text so far."""
        keys = [_mix(symbol) for symbol in symbols]
        levels = [keys]
        for level, last in enumerate(self._last):
            older = last + keys
            self._last[level] = older[-len(last) :]
            keys = [_mix(first * _ODD + second) for first, second in zip(older, keys, strict=False)]
            levels.append(keys)
        return levels


_KEY_BITS = 64
_ODD = 0x9E3779B97F4A7C15
_TAG = 0xFFFFFFFF
_ALL = (1 << _KEY_BITS) - 1


def _mix(number: int) -> int:
    """Mix all bits of a number into the high bits of its key, which select the bucket."""
    number = number * _ODD & _ALL
    return (number ^ number >> 29) * _ODD & _ALL


def _text(symbols: list[int]) -> list[int]:
    return symbols[: symbols.index(GAP)] if GAP in symbols else symbols
