"""What a drafting method is: one value in, one tree out; and where it runs: a DraftSource.

A method implements `Drafter` and joins `DRAFTERS`. It may be wrong, late or empty-handed: that costs
speed, never a token. Not here: any method's name, and anything a verifier decides.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specray.models.llama import Llama, LlamaShape
from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.step import UNLIMITED, DraftFault, DraftLimit


class DraftRow(NamedTuple):
    """One request after a step. Read only.

    The step computed the tokens at positions `start` … `end - 1` for good; the token at `end` is known as well (the
    bonus, or the next one of the prompt), so a drafter that pairs the feature of a token with the token after it has
    all its pairs. KV of its own may lie in the slots of the target's: blocks are shared and freed together.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str  # nothing learnt under one salt may draft for another
    start: int
    end: int
    kv_slots: np.ndarray  # int64 [>= end]: pool slot of each position
    seed: int
    temperature: float
    max_steps: int = UNLIMITED.num_steps  # levels of a tree of which the next step may have use


@dataclass(frozen=True, slots=True, eq=False)
class ProposeContext:
    """What a step leaves behind for the next step's drafts."""

    rows: list[DraftRow]  # want a tree; their last known token, at `end`, is its root
    # To be read, not drafted: in the middle of their prompt, or what is drafted for them would not be verified.
    unfinished: list[DraftRow] = field(default_factory=list)
    # [sum of end - start, len(feature_layers) * hidden]: the computed tokens', first of `rows`, then of `unfinished`
    aux_hidden_states: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TargetView:
    """What a drafter may know of, and share with, the target it drafts for."""

    model: Llama | None  # None for a drafter in a process of its own
    shape: LlamaShape
    dtype: torch.dtype
    folder: Path
    load_format: str
    architecture: str
    eos_token_ids: list[int]
    context_length: int
    num_slots: int  # of the KV pool
    max_rows: int  # requests in a step
    attention_backend: str  # the drafter's
    device: torch.device
    quantization: str | None = None  # of its linears


class DraftFaultError(Exception):
    """A drafter could not draft for this step."""

    def __init__(self, kind: DraftFault) -> None:
        super().__init__(kind)
        self.kind = kind


class Drafter(Protocol):
    """A drafting method with a state per slot. Trees have at most `max_draft_tokens` nodes beside the root."""

    max_draft_tokens: int
    aux_hidden_state_layers: tuple[
        int, ...
    ]  # of the target (see Llama.__call__), side by side in ProposeContext.features
    reads_next_token: bool  # its KV of a token depends on the token after it, too; the prefix cache then minds that

    def propose(self, context: ProposeContext) -> DraftTree:
        """Trees for the rows' next tokens, in the rows' order. A step may not have been told: a row then starts later
        than it ended last time. DraftFaultError if there is nothing to give."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots' requests."""


class DraftSource(Protocol):
    """Where drafts come from: `submit` starts drafting, `collect` takes what is ready for the next step."""

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]: ...

    @property
    def reads_next_token(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """Spent on the drafts that were collected last."""

    def submit(self, context: ProposeContext) -> None: ...

    def collect(self, roots: Sequence[tuple[int, int]], limits: Sequence[DraftLimit]) -> DraftTree:
        """Trees of (slot, last known token) rows, each cut to `limits[i]`; bare roots where none is ready."""

    def release(self, slots: Sequence[int]) -> None: ...

    def take_faults(self) -> list[DraftFault]:
        """What went wrong since the last call."""


class InlineDrafts:
    """DraftSource that drafts in the target's own process and thread; without a drafter, every tree is a root."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._pending: dict[int, RowTree] = {}
        self._draft_probs: dict[int, Tensor] = {}  # DraftTree.draft_probs of the last submit, by slot
        self._faults: list[DraftFault] = []
        self.max_draft_tokens = drafter.max_draft_tokens if drafter else 0
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers if drafter else ()
        self.reads_next_token = drafter is not None and drafter.reads_next_token
        self.seconds = 0.0

    def submit(self, context: ProposeContext) -> None:
        if self._drafter is None:
            return
        start = time.perf_counter()
        try:
            drafts = self._drafter.propose(context)
        except DraftFaultError as fault:
            self._faults.append(fault.kind)
            return
        slots = [row.slot for row in context.rows]
        self._pending.update(zip(slots, drafts.rows(), strict=True))
        self._draft_probs = {} if drafts.draft_probs is None else dict(zip(slots, drafts.draft_probs, strict=True))
        self.seconds = time.perf_counter() - start

    def collect(self, roots: Sequence[tuple[int, int]], limits: Sequence[DraftLimit]) -> DraftTree:
        rows = zip(roots, limits, strict=True)
        trees = [cut_tree(self._pending.pop(slot, None), root, limit) for (slot, root), limit in rows]
        return DraftTree.of(trees, self._take_draft_probs([slot for slot, _ in roots]))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._pending.pop(slot, None)
        if self._drafter is not None:
            self._drafter.release(slots)

    def take_faults(self) -> list[DraftFault]:
        faults, self._faults = self._faults, []
        return faults

    def _take_draft_probs(self, slots: Sequence[int]) -> Tensor | None:
        """DraftTree.draft_probs of these slots' drafts."""
        probs_list, self._draft_probs = self._draft_probs, {}
        if not probs_list:
            return None
        unknown = torch.zeros_like(next(iter(probs_list.values())))
        return torch.stack([probs_list.get(slot, unknown) for slot in slots])


def cut_tree(tree: RowTree | None, root: int, limit: DraftLimit) -> RowTree:
    """A tree that was made for `root`, cut to `limit`; any other one, or none, becomes the root alone."""
    if tree is None or tree.tokens[0] != root:
        return RowTree([root], [NONE])
    tree = _without_levels_below(tree, limit.num_steps)
    end = limit.num_tokens + 1
    return RowTree(tree.tokens[:end], tree.parents[:end])  # parents come first: any cut is a tree


def _without_levels_below(tree: RowTree, num_steps: int) -> RowTree:
    if num_steps >= len(tree.tokens) - 1:
        return tree
    depths: list[int] = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    kept = [node for node, depth in enumerate(depths) if depth <= num_steps]
    places = {node: place for place, node in enumerate(kept)} | {NONE: NONE}
    return RowTree([tree.tokens[node] for node in kept], [places[tree.parents[node]] for node in kept])
