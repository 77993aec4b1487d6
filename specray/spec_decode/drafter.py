"""What a drafting method is: one value in, one tree out; and where it runs: a DraftSource.

A method implements `Drafter` and joins `DRAFTERS`. It may be wrong, late or empty-handed: that costs
speed, never a token. Not here: any method's name, and anything a verifier decides.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree


class DraftRow(NamedTuple):
    """One request after a step: all its known tokens, the bonus last. Read only."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str  # nothing learnt under one salt may draft for another


@dataclass(frozen=True, slots=True, eq=False)
class ProposeContext:
    """What a step leaves behind for the next step's drafts."""

    rows: list[DraftRow]


class Drafter(Protocol):
    """A drafting method with a state per slot. Trees have at most `max_draft_tokens` nodes beside the root."""

    max_draft_tokens: int

    def propose(self, context: ProposeContext) -> DraftTree:
        """Trees for the rows' next tokens, in the rows' order."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots' requests."""


class DraftSource(Protocol):
    """Where drafts come from: `submit` starts drafting, `collect` takes what is ready for the next step."""

    max_draft_tokens: int
    seconds: float  # spent on the drafts of the last submit

    def submit(self, context: ProposeContext) -> None: ...

    def collect(self, roots: Sequence[tuple[int, int]], limits: Sequence[int]) -> DraftTree:
        """Trees of (slot, last known token) rows, each cut to `limits[i]` drafts; bare roots where none is ready."""

    def release(self, slots: Sequence[int]) -> None: ...


class InlineDrafts:
    """DraftSource that drafts in the target's own process and thread; without a drafter, every tree is a root."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._pending: dict[int, RowTree] = {}
        self.max_draft_tokens = drafter.max_draft_tokens if drafter else 0
        self.seconds = 0.0

    def submit(self, context: ProposeContext) -> None:
        if self._drafter is None:
            return
        start = time.perf_counter()
        trees = self._drafter.propose(context).rows()
        self._pending.update(zip((row.slot for row in context.rows), trees, strict=True))
        self.seconds = time.perf_counter() - start

    def collect(self, roots: Sequence[tuple[int, int]], limits: Sequence[int]) -> DraftTree:
        return DraftTree.of([self._take(*root, limit) for root, limit in zip(roots, limits, strict=True)])

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._pending.pop(slot, None)
        if self._drafter is not None:
            self._drafter.release(slots)

    def _take(self, slot: int, root: int, limit: int) -> RowTree:
        tree = self._pending.pop(slot, None)
        if tree is None or tree.tokens[0] != root:
            return RowTree([root], [NONE])
        return RowTree(tree.tokens[: limit + 1], tree.parents[: limit + 1])  # parents come first: any cut is a tree
