"""The tensors of a step around its forward passes, with torch's operations: see `step_ops` for what each does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.outcome import num_emitted
from specray.ops.outcome import tokens as tokens_of
from specray.ops.ragged_index import RaggedIndex
from specray.ops.step_tensors import RequestArena, TreesWanted, TreeTensors
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree


class TorchTable:
    """TableOps. The arena's last row takes what is masked."""

    def __init__(self, arena: RequestArena, uses_triton: bool) -> None:
        self._arena = arena
        self._discard_index = len(arena.cells) - arena.row_size
        self._uses_triton = uses_triton

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        if self._uses_triton:
            from specray.ops.gpu import steps

            return steps.cells_at(self._arena, slots, positions, column)
        return self._arena.cells.index_select(0, slots * self._arena.row_size + column + positions).long()

    def kv_slots(self, slots: Tensor, starts: Tensor | None, width: int) -> Tensor:
        arena, first = self._arena, self._arena.kv_column
        if starts is None:
            rows = arena.cells.view(-1, arena.row_size)[:, first : first + width]
            return rows.index_select(0, slots).long()
        positions = starts[:, None] + torch.arange(width, device=slots.device)
        found = self.cells(slots[:, None].expand_as(positions).flatten(), positions.flatten(), first)
        return found.view_as(positions)

    def append(self, slots: Tensor, outcome: Tensor) -> None:
        num_tokens, tokens = num_emitted(outcome), tokens_of(outcome)
        cells, row_size = self._arena.cells, self._arena.row_size
        known = cells.view(-1, row_size)[:, self._arena.length_column]
        lengths = known.index_select(0, slots).long()
        columns = torch.arange(tokens.shape[1], device=slots.device)
        places = slots[:, None] * row_size + lengths[:, None] + columns
        places = places.where(columns < num_tokens[:, None], self._discard_index)
        cells.index_copy_(0, places.flatten(), tokens.flatten().to(torch.int32))
        known.index_copy_(0, slots, (lengths + num_tokens).to(torch.int32))

    def build_step(
        self, columns: Sequence[Tensor], trees: Sequence[Tensor], total: int, kv_width: int, has_drafts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        tokens, parents, num_nodes = trees
        query_lens = columns[2] + num_nodes - 1
        index = RaggedIndex.of(query_lens, total)
        slots, starts, counts = (column.index_select(0, index.rows) for column in columns)
        places_in_kv, node = starts + index.offsets, index.offsets - counts + 1
        token_ids = self.cells(slots, torch.where(node > 0, starts, places_in_kv), 0)
        positions, ancestors = places_in_kv, None
        if has_drafts:
            ancestors = DraftTree(tokens, parents, num_nodes, tokens.shape[1] - 1).ancestors()
            depth = (ancestors.sum(-1) - 1)[index.rows, node.clamp(min=0)]
            token_ids = torch.where(node > 0, tokens[index.rows, node.clamp(min=0)], token_ids)
            positions = torch.where(node > 0, places_in_kv - node + depth, places_in_kv)
        written = self.cells(slots, places_in_kv, self._arena.kv_column)
        roots, kv_slots = query_lens.cumsum(0) - num_nodes, self.kv_slots(columns[0], None, kv_width)
        return token_ids, positions, written, roots, kv_slots, ancestors

    def extend_input(
        self, slots: Tensor, starts: Tensor, ends: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        index = RaggedIndex.of(ends - starts, total)
        rows, positions = slots.index_select(0, index.rows), starts.index_select(0, index.rows) + index.offsets
        token_ids, written = self.cells(rows, positions + 1, 0), self.cells(rows, positions, self._arena.kv_column)
        return token_ids, positions, written, (ends - starts).cumsum(0) - 1


class TorchTrees:
    """TreeOps."""

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        width = trees.tokens.shape[1]
        pending.tokens[:, :width].index_copy_(0, slots, trees.tokens)
        pending.parents[:, :width].index_copy_(0, slots, trees.parents)
        pending.num_nodes.index_copy_(0, slots, trees.num_nodes)
        if pending.scores is not None and trees.scores is not None:
            pending.scores[:, :width].index_copy_(0, slots, trees.scores)
        elif pending.scores is not None:
            pending.scores.index_fill_(0, slots, 1.0)

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots, roots, most, least = wanted
        tokens, parents, found = (part.index_select(0, slots) for part in pending[:3])
        pending.num_nodes.index_fill_(0, slots, NONE)
        tree = DraftTree(tokens, parents, found, tokens.shape[1] - 1)
        is_usable = (found > 0) & (tokens[:, ROOT] == roots) & tree.is_valid(vocab_size)
        within = torch.where(is_usable, torch.minimum(found, most.to(found.dtype)), 1)
        nodes = torch.arange(tokens.shape[1], device=slots.device)
        num_nodes, scores = within, None
        if pending.scores is not None and least is not None:
            scores = pending.scores.index_select(0, slots)
            num_nodes = ((scores >= least[:, None]) & (nodes < within[:, None])).sum(-1).clamp(min=1)
        is_chain = ((parents == nodes - 1) | (nodes >= num_nodes[:, None])).all(-1)
        tokens, parents = (part.masked_fill(nodes >= num_nodes[:, None], NONE) for part in (tokens, parents))
        tokens[:, ROOT], parents[:, ROOT] = roots, NONE
        report = torch.stack((torch.where(found == 0, 0, num_nodes), is_chain))
        if scores is not None:
            report = torch.cat((report, within[None], scores.t()))
        return tokens, parents, num_nodes, report
