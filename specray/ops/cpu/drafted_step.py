"""A step with drafts that begins before the host knows what the one before it committed, by the CPU kernels.

They draft from what that step committed, and compute and verify the trees. `drafted_step.h` does it.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu import structs
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES
from specray.ops.cpu.verification import Verification, VerifiedTrees


class PlannedDrafts(NamedTuple):
    """Draft extend and trees of B requests, for the kernels to make once they know what a step committed."""

    num_levels: int
    num_drafts: int  # of each tree, the root not counted
    network: structs.DraftNetwork
    growth: structs.Growth  # without what the trees grow from, and where they go
    kept: tuple[object, ...]  # what these point to
    drafter: str = ""  # which of several drafters it is


class DraftedStep:
    """What such a step takes from the one before, and its trees. The tensors are there once its pass has ended."""

    def __init__(
        self,
        before: Verification,
        drafts: PlannedDrafts,
        most_nodes: Sequence[int],
        least_scores: Sequence[float] | None,
    ) -> None:
        """`before` has one row for each node of its trees.

        At most `most_nodes` of each tree are verified, the root included, and none of a score below `least_scores`, if
        that is not None.
        """
        count, width = len(most_nodes), 1 + drafts.num_drafts
        tokens, parents = torch.empty(2, count, width, dtype=torch.int64).unbind()
        numbers = torch.empty(4, count, dtype=torch.int64)
        report = torch.empty(3 + width, count)
        self._seconds = ctypes.c_double(0.0)
        self.drafter = drafts.drafter
        self.most_rows = sum(most_nodes)
        self.trees = VerifiedTrees(tokens, parents, numbers[0], min(drafts.num_levels, width - 1))
        self.report = report[:2] if least_scores is None else report  # see TreeOps.take
        self.after = before.of_trees(self.trees)
        most = (ctypes.c_int64 * count)(*most_nodes)
        least = None if least_scores is None else (ctypes.c_float * count)(*least_scores)
        self.struct = structs.DraftedStep(
            before=before.struct,
            network=ctypes.pointer(drafts.network),
            growth=drafts.growth,
            most=ctypes.addressof(most),
            least=None if least is None else ctypes.addressof(least),
            tokens=pointer(tokens),
            parents=pointer(parents),
            numbers=pointer(numbers),
            report=pointer(report),
            draft_seconds=ctypes.addressof(self._seconds),
        )
        self._kept = before, drafts, numbers, report, most, least

    @property
    def seconds(self) -> float:
        """Time until the pass over the trees began."""
        return self._seconds.value

    def read(self, hidden_states: Tensor) -> None:
        """Draft from these, [rows of the step before, columns], which must live as long."""
        self.struct.hidden_states, self.struct.type = pointer(hidden_states), FLOAT_TYPES[hidden_states.dtype]
        self.struct.columns = hidden_states.shape[1]
