"""Layers that keep a state for each request beside the KV cache, and how speculation leaves no trace in it.

Such a layer reads tokens in order: a short convolution keeps its last inputs, a gated delta net a matrix for each head.
A request has one state for each operation of such a layer, in the row of a pool that belongs to its slot.

A step computes each row from the state of the row before it on its path: prompt chunks, decoding rows and the nodes of
draft trees alike, one row after the other in one order of arithmetic. So a token has the same bits wherever it is
computed. The known rows of a step belong to the text whatever is verified; the state in the pool becomes the one behind
the last of them. Drafts are computed from copies. Once they are verified, `StatePass.commit` runs the accepted ones
again as known rows: the same operations on the same inputs, which were kept, without the layers' matrices. This needs
no copy of a state for each node after the pass, works for any tree, and costs nothing where no draft is accepted.

Nothing resets a state: a request whose first row is at position 0 starts from zeros. For the prefix cache, states at
chosen places of a text are also copied into rows of the pools that belong to no request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import Attend


class StateShape(NamedTuple):
    """What one operation keeps of a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_inputs: int  # values of a token that it reads

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


# Of a request: by a number of its rows of a step, the row of the pools that also receives the state behind these.
StateCopies = Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """T rows of R requests, one request after the other. All tensors are int64 and on the host.

    The first `num_known[r]` rows of request r follow each other and are part of its text; the others are drafts.
    """

    slots: Tensor  # [R]: the requests' rows of the pools
    lens: Tensor  # [R]: rows of each request
    num_known: Tensor  # [R]; 0: the state in the pool stays as it is
    is_fresh: Tensor  # [R]; 1: the request starts from zeros instead of the state in the pool
    parents: Tensor  # [T]: the row whose state each row continues; -1: none of this step
    copies: Tensor  # [T]: the row of the pools that also receives the state behind each known row; -1: none

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        lens: Sequence[int],
        num_known: Sequence[int],
        is_fresh: Sequence[bool],
        trees: Sequence[Sequence[int]] | None = None,
        copies: Sequence[StateCopies] | None = None,
    ) -> "StateRows":
        """Rows behind whose known ones lie the nodes of `trees`: the parents of each one's nodes, the root's first.

        Those of `copies` that lie behind other rows than known ones are not made.
        """
        parents, copied = np.arange(-1, sum(lens) - 1), np.full(sum(lens), -1)
        end = 0
        for row, (length, known) in enumerate(zip(lens, num_known, strict=True)):
            first, end = end, end + length
            parents[first] = -1
            if length > known:
                assert trees is not None
                parents[first + known : end] = np.array(trees[row][1 : 1 + length - known]) + first + known - 1
            for count, copy in copies[row].items() if copies else ():
                if 0 < count <= known:
                    copied[first + count - 1] = copy
        numbers = torch.from_numpy(np.array((slots, lens, num_known, is_fresh), dtype=np.int64))
        of_rows = torch.from_numpy(parents), torch.from_numpy(copied)
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], *of_rows)

    @classmethod
    def apart(cls, count: int) -> "StateRows":
        """`count` rows that see nothing but themselves and change no state."""
        rows = cls.of([0] * count, [1] * count, [1] * count, [True] * count)
        return replace(rows, num_known=torch.zeros_like(rows.num_known))

    @property
    def total(self) -> int:
        return self.parents.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedStateRows:
    """R requests of up to N rows: all sizes are fixed and all contents are on the device, as CUDA graphs need it.

    A row that is neither known nor a node of a tree is padding. The T rows are N of each request, unless `places` says
    otherwise.
    """

    slots: Tensor  # int64 [R]: the requests' rows of the pools
    num_known: Tensor  # int64 [R]: known rows follow each other and come first; 0: the state in the pool stays as it is
    is_fresh: Tensor  # bool [R]
    parents: Tensor  # int64 [R, N]: the row of the same request that each row continues; -1: none of this step
    copies: Tensor  # int64 [R, N]: the row of the pools that also receives the state behind each known row; -1: none
    # bool [R, N, N]: whether row j is row i or before it on its path, for drafts behind one known row; None: no drafts
    sees: Tensor | None = None
    # (int64 [R, N], the place of each row among the T; int64 [T], that of each of these among the R * N). Each is the
    # other's inverse where there is a row, and any elsewhere.
    places: tuple[Tensor, Tensor] | None = None

    @property
    def total(self) -> int:
        return self.parents.numel() if self.places is None else len(self.places[1])

    def padded(self, values: Tensor) -> Tensor:
        """[R * N, any] of `values` [T, any]."""
        return values if self.places is None else values.index_select(0, self.places[0].flatten())

    def flat(self, values: Tensor) -> Tensor:
        """[T, any] of `values` [R * N, any]."""
        return values if self.places is None else values.index_select(0, self.places[1])


AnyStateRows = StateRows | PaddedStateRows


class StateOperation(Protocol):
    """An operation of a layer that reads and writes states."""

    @property
    def shape(self) -> StateShape: ...

    def __call__(self, inputs: Sequence[Tensor], pool: Tensor, rows: AnyStateRows) -> Tensor:
        """[T, any] of the shape and type of the last of `inputs`, each [T, any]; `pool` is [slots, *shape]."""


class States(Protocol):
    """The states of one forward pass, whose layers take theirs in the order in which they run."""

    def run(self, operation: StateOperation, *inputs: Tensor) -> Tensor: ...


class StatePass:
    """The states of one forward pass, in pools."""

    def __init__(self, pools: Sequence[Tensor], rows: StateRows, copies: Sequence[StateCopies] | None = None) -> None:
        """`pools` are those of the operations, in the order in which they run.

        `copies` are those that `rows` were made with; here, rows behind the known ones are accepted drafts.
        """
        self._pools, self._rows, self._copies = pools, rows, copies
        self._next = 0
        self._num_drafts: list[int] = (rows.lens - rows.num_known).tolist()
        self._kept: list[tuple[StateOperation, list[Tensor]]] = []  # inputs of the drafts, by operation
        places: list[int] = []
        for end, count in zip(rows.lens.cumsum(0).tolist(), self._num_drafts, strict=True):
            places += range(end - count, end)
        self._drafts = torch.tensor(places) if places else None

    def run(self, operation: StateOperation, *inputs: Tensor) -> Tensor:
        """The operation's result, [T, any]."""
        pool = self._pools[self._next]
        self._next += 1
        if self._drafts is not None:
            places = self._drafts.to(inputs[0].device)
            self._kept.append((operation, [part.index_select(0, places) for part in inputs]))
        return operation(inputs, pool, self._rows)

    @property
    def is_complete(self) -> bool:
        """Whether every operation has run."""
        return self._next == len(self._pools)

    def commit(self, accepted: Sequence[Sequence[int]]) -> None:
        """Bring the states behind the accepted drafts: of each request the nodes of its tree, from depth 1 on."""
        if not any(accepted):
            return
        places, start = [], 0
        for nodes, count in zip(accepted, self._num_drafts, strict=True):
            places += [start + node - 1 for node in nodes]
            start += count
        rows = self._accepted_rows(accepted)
        index = torch.tensor(places)
        for (operation, inputs), pool in zip(self._kept, self._pools, strict=True):
            operation([part.index_select(0, index.to(part.device)) for part in inputs], pool, rows)
        self._kept = []

    def _accepted_rows(self, accepted: Sequence[Sequence[int]]) -> StateRows:
        taken = [request for request, nodes in enumerate(accepted) if nodes]
        lens = [len(accepted[request]) for request in taken]
        slots, num_known = self._rows.slots.tolist(), self._rows.num_known.tolist()
        copies = None
        if self._copies is not None:
            copies = [
                {count - num_known[request]: row for count, row in self._copies[request].items()} for request in taken
            ]
        return StateRows.of([slots[request] for request in taken], lens, lens, [False] * len(taken), copies=copies)


class StatefulAttend:
    """An Attend that brings along the states of the same pass."""

    def __init__(self, attend: Attend, states: States) -> None:
        self._attend, self.states = attend, states

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        return self._attend(layer, q, kv)
