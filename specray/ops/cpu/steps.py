"""The tensors of a step around its forward passes, each group in one call of the kernels.

`specray.spec_decode.torch_step_ops` says what each does. As torch's operations, some hundred on a few numbers for each
request, they took a tenth of a step.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.cpu import structs
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.structs import pointer
from specray.ops.step_tensors import RequestBuffer, TreesWanted, TreeTensors


class TableKernels:
    """TableOps."""

    def __init__(self, kernels: Kernels, buffer: RequestBuffer) -> None:
        self._kernels = kernels
        self._keep_alive = buffer  # the struct has its address
        columns = (buffer.row_size, buffer.kv_column, buffer.length_column)
        self.struct = structs.RequestBufferStruct(pointer(buffer.cells), *columns)
        self._buffer = ctypes.byref(self.struct)

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        inputs = slots.contiguous(), positions.contiguous()
        found = torch.empty(slots.shape[0], dtype=torch.int64)
        self._kernels.gather_cells(self._buffer, slots.shape[0], *map(pointer, inputs), column, pointer(found))
        return found

    def build_step(
        self, columns: Sequence[Tensor], trees: Sequence[Tensor], total: int, kv_width: int, has_drafts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        count, width = trees[0].shape
        inputs = [part.contiguous() for part in (*columns, *trees)]
        rows = structs.StepRowsStruct(count, width, *[part.data_ptr() for part in inputs])
        sizes = (total, total, total, count, count * kv_width)
        step = torch.empty(sum(sizes), dtype=torch.int64)
        ancestors = torch.empty(count, width, width, dtype=torch.bool) if has_drafts else None
        self._kernels.build_step(self._buffer, ctypes.byref(rows), total, kv_width, step.data_ptr(), pointer(ancestors))
        token_ids, positions, written, roots, kv_slots = step.split_with_sizes(sizes)
        return token_ids, positions, written, roots, kv_slots.view(count, kv_width), ancestors

    def kv_slots(self, slots: Tensor, starts: Tensor | None, width: int) -> Tensor:
        inputs = slots.contiguous(), None if starts is None else starts.contiguous()
        found = torch.empty(slots.shape[0], width, dtype=torch.int64)
        self._kernels.gather_kv_slots(self._buffer, slots.shape[0], *map(pointer, inputs), width, pointer(found))
        return found

    def append(self, slots: Tensor, outcome: Tensor) -> None:
        slots = slots.contiguous()
        self._kernels.append_tokens(self._buffer, slots.shape[0], pointer(slots), pointer(outcome), outcome.shape[1])

    def extend_input(
        self, slots: Tensor, starts: Tensor, ends: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = [part.contiguous() for part in (slots, starts, ends)]
        token_ids, positions, written = torch.empty(3, total, dtype=torch.int64).unbind()
        last = torch.empty(slots.shape[0], dtype=torch.int64)
        outputs = (token_ids, positions, written, last)
        self._kernels.build_extend(self._buffer, slots.shape[0], *map(pointer, inputs), *map(pointer, outputs))
        return outputs


class TreeKernels:
    """TreeOps."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._pending: TreeTensors | None = None  # the last ones, of which the struct has the addresses
        self._struct = structs.PendingTreesStruct()

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        inputs = [None if part is None else part.contiguous() for part in (slots, *trees)]
        width = trees.tokens.shape[1]
        self._kernels.put_trees(self._struct_of(pending), slots.shape[0], *map(pointer, inputs), width)

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots, roots, most, least = wanted
        count, width = slots.shape[0], pending.tokens.shape[1]
        inputs = [slots.contiguous(), roots.contiguous(), most.contiguous(), least]
        tokens, parents = torch.empty(2, count, width, dtype=torch.int64).unbind()
        numbers = torch.empty(4, count, dtype=torch.int64)
        self._kernels.take_trees(
            self._struct_of(pending),
            count,
            *map(pointer, inputs),
            vocab_size,
            tokens.data_ptr(),
            parents.data_ptr(),
            numbers.data_ptr(),
        )
        num_nodes, report = numbers[0], numbers[1:3]
        if least is not None:
            assert pending.scores is not None
            report = torch.cat((numbers[1:].float(), pending.scores.index_select(0, slots).t()))
        return tokens, parents, num_nodes, report

    def _struct_of(self, trees: TreeTensors) -> structs.PendingTreesStruct:
        if trees is not self._pending:
            self._pending = trees
            self._struct = structs.PendingTreesStruct(*map(pointer, trees), trees.tokens.shape[1])
        return self._struct
