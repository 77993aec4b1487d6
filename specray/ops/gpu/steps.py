"""The tensors of padded steps on a GPU, each group in one launch. `torch_step_ops` says what they do."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from specray.ops.attention import PaddedBatch
from specray.ops.gpu.launches import alike, by_rows
from specray.ops.gpu.step_kernels import (
    build_extend,
    build_trees,
    commit_tokens,
    gather_cells,
    load_trees,
    put_trees,
    take_trees,
)
from specray.ops.gpu.tree_kernels import await_trees, release_trees
from specray.ops.step_tensors import RequestBuffer, TreesWanted, TreeTensors

_BLOCK = 128  # cells of a program


def cells_at(buffer: RequestBuffer, slots: Tensor, positions: Tensor, column: int) -> Tensor:
    """int64 [T], the cells `column` + position of each slot; slots and positions are int64 [T]."""
    count = len(slots)
    out = torch.empty(count, dtype=torch.int64, device=slots.device)
    if count:
        places = (slots.contiguous(), positions.contiguous())
        gather_cells[(triton.cdiv(count, _BLOCK),)](
            out, buffer.cells, *places, count, buffer.row_size, column, BLOCK=_BLOCK, num_warps=4
        )
    return out


def load(step: Sequence[Tensor], slots: Tensor, num_nodes: Tensor, trees: Sequence[Tensor], padding_slot: int) -> None:
    """Make `step` (slots [R], numbers of nodes [R], tokens and parents [R, N]) that of these B <= R trees."""
    tokens, parents = (by_rows(part) for part in trees)
    max_rows, max_nodes = step[2].shape
    load_trees[(max_rows,)](
        *step,
        slots.contiguous(),
        num_nodes.contiguous(),
        tokens,
        parents,
        *tokens.shape,
        max_nodes,
        padding_slot,
        tokens.stride(0),
        parents.stride(0),
        PADDED=triton.next_power_of_2(max(max_nodes, tokens.shape[1])),
        num_warps=1,
    )


def tree_input(
    buffer: RequestBuffer,
    slots: Tensor,
    num_nodes: Tensor,
    trees: tuple[Tensor, Tensor],
    kv_slots: Tensor,
    padding_kv_slot: int,
    kept: Tensor,
    total: int,
) -> tuple[Tensor, Tensor, PaddedBatch]:
    """(token ids, positions, attention) of the trees' tokens and parents [B, N]; see `TorchTable.tree_input`."""
    tokens, parents = alike(*trees)
    num_trees, width = tokens.shape
    num_nodes = num_nodes.contiguous()
    token_ids, positions, prefix_lens, rows, written, lengths = _columns(6, total, slots.device)
    paths = torch.empty(total, width + 1, dtype=torch.int64, device=slots.device)
    build_trees[(num_trees,)](
        token_ids,
        positions,
        prefix_lens,
        rows,
        written,
        paths,
        lengths,
        kept,
        total,
        buffer.cells,
        slots,
        num_nodes,
        tokens,
        parents,
        buffer.row_size,
        buffer.kv_column,
        buffer.length_column,
        padding_kv_slot,
        tokens.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )
    batch = PaddedBatch(prefix_lens, rows, kv_slots, paths, lengths, written, width, num_nodes)
    return token_ids, positions, batch


def commit(buffer: RequestBuffer, report: Tensor, slots: Tensor, outcome: Tensor) -> None:
    """Append accepted tokens to the requests; `outcome` [B, 2 + 2 * D] is VerifyOutput's, `report` its copy."""
    num_rows, columns = outcome.shape
    width = columns // 2 - 1
    commit_tokens[(num_rows,)](
        buffer.cells,
        report,
        slots,
        outcome.contiguous(),
        buffer.row_size,
        buffer.length_column,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )


def extend_input(
    buffer: RequestBuffer,
    slots: Tensor,
    counts: Tensor,
    states: Tensor,
    width: int,
    kv_slots: Tensor,
    padding_kv_slot: int,
) -> tuple[Tensor, Tensor, PaddedBatch, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `ExtendInput` for places of `states` [B, N], of which the first `counts` [B] count."""
    num_rows = len(states)
    count, device = num_rows * width, slots.device
    token_ids, positions, prefix_lens, rows, written, places, lengths = _columns(7, count, device)
    ends, last, roots = _columns(3, num_rows, device)
    paths = torch.empty(count, width, dtype=torch.int64, device=device)
    build_extend[(num_rows,)](
        token_ids,
        positions,
        prefix_lens,
        rows,
        written,
        places,
        paths,
        lengths,
        ends,
        last,
        roots,
        buffer.cells,
        slots,
        counts,
        by_rows(states),
        buffer.row_size,
        buffer.kv_column,
        buffer.length_column,
        padding_kv_slot,
        counts.stride(0),
        states.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )
    batch = PaddedBatch(prefix_lens, rows, kv_slots, paths, lengths, written, width)
    return token_ids, positions, batch, places, last, ends, roots


class TritonTreeOps:
    """See `TorchTrees`."""

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots, roots, most, least = wanted
        num_rows, width = len(slots), pending.tokens.shape[1]
        tokens, parents = torch.empty(2, num_rows, width, dtype=torch.int64, device=slots.device)
        num_nodes, report = slots.new_empty(num_rows), slots.new_empty(2, num_rows)
        if least is not None:
            report = slots.new_empty(3 + width, num_rows, dtype=torch.float32)
        scores = pending.scores
        take_trees[(num_rows,)](
            tokens,
            parents,
            num_nodes,
            report,
            *pending[:3],
            num_nodes if scores is None else scores,  # not read without `least`, like the next
            most if least is None else least,
            slots.contiguous(),
            roots.contiguous(),
            most,
            num_rows,
            vocab_size,
            CUTS=least is not None,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=1,
        )
        return tokens, parents, num_nodes, report

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        tokens, parents, num_nodes = by_rows(trees.tokens), by_rows(trees.parents), trees.num_nodes.contiguous()
        scores = None if trees.scores is None else by_rows(trees.scores)
        pending_scores, width = pending.scores, pending.tokens.shape[1]
        if len(slots):
            put_trees[(len(slots),)](
                *pending[:3],
                num_nodes if pending_scores is None else pending_scores,  # not written without scores
                slots.contiguous(),
                tokens,
                parents,
                num_nodes if scores is None else scores,
                num_nodes,
                tokens.shape[1],
                tokens.stride(0),
                parents.stride(0),
                0 if scores is None else scores.stride(0),
                KEEPS_SCORES=pending_scores is not None,
                HAS_SCORES=scores is not None,
                WIDTH=width,
                PADDED=triton.next_power_of_2(width),
                num_warps=1,
            )


def release(flag: Tensor, number: int) -> None:
    """See TorchStepOps.release_trees."""
    release_trees[(1,)](flag, number, num_warps=1)


def await_released(
    flag: Tensor, num_nodes: Tensor, most_nodes: int, number: int, timeout_s: float
) -> tuple[Tensor, Tensor]:
    """See TorchStepOps.await_trees."""
    count = len(num_nodes)
    found, in_time = num_nodes.new_empty(count), num_nodes.new_empty(1)
    await_trees[(1,)](
        found,
        in_time,
        flag,
        num_nodes,
        number,
        int(timeout_s * 1e6),
        count,
        num_nodes.stride(0),
        most_nodes,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return found, in_time


def _columns(number: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.empty(number, count, dtype=torch.int64, device=device).unbind()
