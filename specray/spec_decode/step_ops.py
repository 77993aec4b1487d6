"""The tensors of a step around its forward passes: its input, what it committed, and trees that wait for the next one.

They are a few numbers for each request. On a CPU each group is one call of the kernels (`specray.ops.cpu.steps`);
elsewhere torch computes them (`torch_step_ops`), and Triton's kernels some of them. All are chosen here, once.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specray.ops.cpu.library import kernels_on
from specray.ops.cpu.steps import TableKernels, TreeKernels
from specray.ops.gpu import uses_triton
from specray.ops.step_tensors import RequestArena, TreesWanted, TreeTensors
from specray.spec_decode.torch_step_ops import TorchTable, TorchTrees


class FlatTokens(NamedTuple):
    """The T tokens of R rows and their trees."""

    token_ids: Tensor  # int64 [T], like the next two
    positions: Tensor
    slot_mapping: Tensor  # KV slots to write
    roots: Tensor  # int64 [R], places of the roots; a root's nodes follow it
    kv_slots: Tensor  # int64 [R, kv_width]: those of the first positions
    ancestors: Tensor | None  # see DraftTree; None: there are no drafts


class TableOps(Protocol):
    """Reads and writes the rows of a request table. Slots, positions and tokens are int64."""

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        """int64 [T], the cells `column` + position of each slot."""

    def kv_slots(self, slots: Tensor, starts: Tensor | None, width: int) -> Tensor:
        """KV slots [n, width] of `width` positions from `starts` [n] on, by default from 0."""

    def append(self, slots: Tensor, outcome: Tensor) -> None:
        """Append the tokens that `slots` [n] emitted; `outcome` is that of StepOutput."""

    def build_step(
        self, columns: Sequence[Tensor], trees: Sequence[Tensor], total: int, kv_width: int, has_drafts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The fields of FlatTokens, `total` tokens in all.

        `columns` are slots, positions of the first tokens to compute, and their numbers, the root included, each [R];
        `trees` are tokens and parents [R, N] and numbers of nodes [R].
        """

    def extend_input(
        self, slots: Tensor, starts: Tensor, ends: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a draft head reads of positions `starts` to `ends` of each request, `total` in all.

        (next token ids, positions and KV slots [total], places of the requests' last positions [n]).
        """


class TreeOps(Protocol):
    """Reads and writes trees by slot: the `pending` ones are [slots, W]."""

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        """Keep the trees of `slots` [B]; they replace older ones. If they have scores, so have the pending ones."""

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens and parents [B, W], numbers of nodes [B], report [2, B]) of trees, which no longer wait.

        The report has the numbers of nodes, 0 if the drafter's logits
        were not finite, and which trees are chains. With `least`, nodes of a lower score are cut, and the
        report is float32 [3 + W, B]: also the numbers of nodes before that, and the nodes' scores.
        """


def table_ops(arena: RequestArena, device: torch.device) -> TableOps:
    """The operations on a request table, which has `arena`."""
    own = kernels_on(device)
    return TorchTable(arena, uses_triton(device)) if own is None else TableKernels(own, arena)


def tree_ops(device: torch.device) -> TreeOps:
    """The operations on trees that wait."""
    if uses_triton(device):
        from specray.ops.gpu import steps

        return steps.TritonTreeOps()
    own = kernels_on(device)
    return TorchTrees() if own is None else TreeKernels(own)
