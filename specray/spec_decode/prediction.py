"""A predicted output, and where in it the real output is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_MATCH = 2  # with one token, a frequent word would lead to the wrong place


@dataclass(slots=True, eq=False)
class Prediction:
    """A predicted output, and the place in it that the real output has reached."""

    token_ids: Sequence[int]
    num_followed: int = 0  # output tokens
    num_in_row: int = 0  # the last ones of these that are in the prediction, one after the other
    _next: int | None = 0  # place of the token expected next; None away from the prediction
    _left_at: int = 0  # where the output last left it
    _last: list[int] = field(default_factory=list)  # the last MIN_MATCH output tokens
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # places after each n-gram, ascending

    def __post_init__(self) -> None:
        for end in range(MIN_MATCH, len(self.token_ids) + 1):
            self._places.setdefault(tuple(self.token_ids[end - MIN_MATCH : end]), []).append(end)

    def advance(self, output: Sequence[int]) -> None:
        """Read the next output tokens."""
        for token in output:
            self._last = [*self._last[1 - MIN_MATCH :], token]
            if self._next is not None and list(self.token_ids[self._next : self._next + 1]) == [token]:
                self._next += 1
                self.num_in_row += 1
                continue
            self._left_at = self._left_at if self._next is None else self._next
            self._next = self._found()
            self.num_in_row = 0 if self._next is None else MIN_MATCH
        self.num_followed += len(output)

    def next_tokens(self, most: int) -> list[int]:
        """Up to `most` tokens that are expected next; none away from the prediction."""
        return [] if self._next is None else list(self.token_ids[self._next : self._next + most])

    def _found(self) -> int | None:
        """The place after the last output tokens: the first one past where the output left, or the last one before."""
        places = self._places.get(tuple(self._last), [])
        return next((place for place in places if place >= self._left_at), places[-1] if places else None)
