"""Where the last words were seen before: texts one behind the other, and the places in them that end alike.

A trie of every stretch of the texts would cost as many nodes a token as it is deep. It is not stored: its node for some
words is the places that end in them, its children are what follows there, the most recent first. Such places are found
as zlib finds repetitions: hashed stretches of 1, 2, 4, 8, … symbols, each place linked to the one before it that has
the same hash. Symbols are numbers above 0, `GAP` stands between texts. Not here: whose text it is, or any tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GAP = 0  # no symbol: what memory holds before anything was written, too
MOST_PLACES = 16  # most recent places of a stretch that are looked at
_MOST_STEPS = 4 * MOST_PLACES  # along a chain, which other stretches may share


class Match(NamedTuple):
    """A place that ends like the words searched for."""

    length: int  # symbols in common
    follows: list[int]  # symbols behind it, up to the end of its text


class SuffixIndex:
    """The last `capacity` symbols of a stream, searched for matches of up to `window` symbols and the `reach` behind.

    Memory is taken as it is filled: per symbol of capacity 8 bytes, and 20 to 28 for each of the `num_levels(window)`.
    """

    def __init__(self, capacity: int, window: int, reach: int) -> None:
        levels = num_levels(window)
        self.capacity = capacity
        self._window = window
        self._size = capacity + window + 1  # a match may begin before what is kept; a gap stands behind the end
        self._around = np.arange(1 - window, reach + 1)
        self._symbols = np.zeros(self._size, dtype=np.int64)
        self._end = 1  # place of the next symbol, counted from the stream's beginning; place 0 is nowhere
        self._shift = 64 - capacity.bit_length()
        self._tags = np.zeros((levels, self._size), dtype=np.uint32)
        previous = np.zeros((levels, self._size), dtype=np.int64)
        latest = np.zeros((levels, 1 << capacity.bit_length()), dtype=np.int64)
        # Read and written one by one, which numpy is slow at.
        self._tag_views = [row.data for row in self._tags]
        self._previous = [row.data for row in previous]
        self._latest = [row.data for row in latest]
        self.end_keys: list[int] = [0] * levels

    def __len__(self) -> int:
        """Symbols seen so far, forgotten ones too."""
        return self._end - 1

    def extend(self, symbols: Sequence[int]) -> None:
        """Append `symbols`; `end_keys` are then those of the stretches that end with the last one."""
        new = np.array(symbols[-self.capacity :], dtype=np.int64)
        if not len(new):
            return
        levels = len(self._latest)
        before = np.arange(self._end + 1 - (1 << levels - 1), self._end)  # stretches may begin there
        keys = stretch_keys(np.concatenate((self._symbols[before % self._size], new)), levels)[:, len(before) :]
        places = np.arange(self._end, self._end + len(new))
        slots = places % self._size
        self._symbols[slots] = new
        self._tags[:, slots] = keys >> np.uint64(8) & _TAG
        buckets = (keys >> np.uint64(self._shift)).tolist()
        for row, previous, latest in zip(buckets, self._previous, self._latest, strict=True):
            for bucket, place, slot in zip(row, places.tolist(), slots.tolist(), strict=True):
                previous[slot] = latest[bucket]
                latest[bucket] = place
        self._end += len(new)
        self._symbols[self._end % self._size] = GAP
        self.end_keys = keys[:, -1].tolist()

    def find(self, level: int, key: int, suffix: NDArray[np.int64]) -> dict[int, Match]:
        """The most recent places, the last first, whose last 2 ** level symbols are those with `key`.

        `suffix` [window] is the words searched for, the last first, GAPs behind.
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
        tags, previous = self._tag_views[level], self._previous[level]
        tag = key >> 8 & int(_TAG)
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


def stretch_keys(symbols: NDArray[np.int64], levels: int) -> NDArray[np.uint64]:
    """uint64 [levels, n]: a hash of the 2 ** level symbols that end at each place; of fewer it means nothing."""
    rows = [_mix(symbols.view(np.uint64))]
    for level in range(1, levels):
        half, last = 1 << level - 1, rows[-1]
        rows.append(np.concatenate((last[:half], _mix(last[:-half] * _ODD + last[half:]))))
    return np.stack(rows)


_ODD = np.uint64(0x9E3779B97F4A7C15)
_TAG = np.uint64(0xFFFFFFFF)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of a number in its high ones, which choose the bucket."""
    numbers = numbers * _ODD
    return (numbers ^ (numbers >> np.uint64(29))) * _ODD


def _text(symbols: list[int]) -> list[int]:
    return symbols[: symbols.index(GAP)] if GAP in symbols else symbols
