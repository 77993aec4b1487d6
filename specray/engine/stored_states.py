"""States for the prefix cache: which rows of the ranks' state pools hold the states behind cached blocks.

A model with states can start behind a cached block only where its states were stored. They are as large as the KV of
hundreds of tokens, so a request stores them at few places: behind its prompt's last full block, for the conversation's
next turn; where it left a cached text, which others share up to there; and while it goes on, every INTERVAL tokens, of
which only the last ones stay. A row that is missing is taken from the states that were used least recently.
"""

from collections.abc import Iterable, Sequence

from specray.engine.cache_nodes import CacheNode
from specray.engine.request import Request

INTERVAL = 64  # tokens, rounded up to full blocks

StateCopy = tuple[int, int]  # see ScheduledRequest


class StoredStates:
    """Owns `num_rows` rows of the state pools from `first_row` on; None: the model has no states."""

    def __init__(self, first_row: int, num_rows: int | None, block_size: int) -> None:
        self.num_rows, self._block_size = num_rows, block_size
        self._interval = -(-INTERVAL // block_size) * block_size
        self._free = list(range(first_row + (num_rows or 0) - 1, first_row - 1, -1))
        self._rows: dict[CacheNode, int] = {}  # those used least recently first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_stored(self) -> int:
        return len(self._rows)

    def start(self, request: Request, path: list[CacheNode]) -> list[CacheNode]:
        """Choose where a request stores states. Returns the part of its cached `path` behind which states are stored.

        The request's `stored_state` is their row.
        """
        if self.num_rows is None:
            return path
        size, most = self._block_size, len(request.token_ids) - 1  # one token is left to compute
        request.state_places = {len(path) * size, most // size * size}
        request.stored_state, request.latest_state = -1, None
        for end in range(len(path), 0, -1):
            if (row := self._rows.pop(path[end - 1], None)) is not None:
                self._rows[path[end - 1]] = request.stored_state = row
                return path[:end]
        return []

    def reserve(self, request: Request, num_tokens: int, num_drafts: int) -> list[StateCopy]:
        """Rows for the states of the next step, which computes known tokens and may accept drafts."""
        if not request.shares_prefix:
            return []
        start = request.num_computed_tokens + sum(planned.num_tokens for planned in request.in_flight)
        end = start + num_tokens + num_drafts + sum(planned.num_drafts for planned in request.in_flight)
        places = {place for place in request.state_places if start < place <= end}
        if (latest := end // self._interval * self._interval) > start:
            places.add(latest)
        rows = ((place, self._take_row()) for place in sorted(places))
        return [(place, row) for place, row in rows if row is not None]

    def commit(self, request: Request, copies: Sequence[StateCopy], start: int) -> None:
        """Keep the states of a step that has committed a request's tokens from `start` on, if its blocks are cached."""
        for place, row in copies:
            if start < place <= len(request.shared_path) * self._block_size:
                self._store(request, place, row)
            else:
                self._free.append(row)

    def release(self, copies: Iterable[StateCopy]) -> None:
        """Give back reserved rows. What is planned may still write them, but nothing later reads that."""
        self._free.extend(row for _, row in copies)

    def forget(self, node: CacheNode) -> None:
        """Drop the states behind a block."""
        if (row := self._rows.pop(node, None)) is not None:
            self._free.append(row)

    def _take_row(self) -> int | None:
        if not self._free and self._rows:
            self.forget(next(iter(self._rows)))
        return self._free.pop() if self._free else None

    def _store(self, request: Request, place: int, row: int) -> None:
        node = request.shared_path[place // self._block_size - 1]
        if node in self._rows:  # another request has computed the same
            self._free.append(row)
            return
        self._rows[node] = row
        if place not in request.state_places:
            before, request.latest_state = request.latest_state, node
            if before is not None and before.num_users == 1:  # this request is the only one
                self.forget(before)
