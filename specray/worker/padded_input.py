"""The input of the target and of draft heads in padded steps.

Shapes are fixed, and everything is read from the request table on the device.

Padding rows are empty requests. What is not a token of a request has position 0, and its KV goes to a KV slot that
nobody reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.attention import PaddedBatch, pack_paths
from specray.ops.gpu import uses_triton
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.request_table import RequestTable


class TreeInput(NamedTuple):
    """All nodes of B trees of N places, T = B * N tokens."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: PaddedBatch


class ExtendInput(NamedTuple):
    """The tokens behind those that B requests committed, T = B * width."""

    token_ids: Tensor  # int64 [T], of the next position
    positions: Tensor  # int64 [T], of the committed tokens
    attention: PaddedBatch
    nodes: Tensor  # int64 [T], places of their hidden states among the B * N of the step
    last: Tensor  # int64 [B], place of each request's last token among the T
    ends: Tensor  # int64 [B], position of each request's last known token, the root of its next tree
    roots: Tensor  # int64 [B], that token


def tree_input(table: RequestTable, slots: Tensor, tree: DraftTree, padding_kv_slot: int, kept: Tensor) -> TreeInput:
    """The input of the target. `slots` int64 [B] are rows of the table.

    `kept` int64 [B, 1 + N], contiguous, becomes the requests' known tokens and the KV slots of their nodes.
    """
    if uses_triton(slots.device):
        from specray.ops.gpu import steps

        trees = (tree.tokens, tree.parents)
        parts = steps.tree_input(table.arena, slots, tree.num_nodes, trees, table.kv_slots, padding_kv_slot, kept)
        return TreeInput(*parts)
    width = tree.tokens.shape[1]
    nodes = torch.arange(width, device=slots.device)
    lengths = table.num_tokens.index_select(0, slots).long()
    places = (lengths[:, None] - 1 + nodes).clamp(min=0)
    rows = slots.repeat_interleave(width)
    kv_slots = table.kv_slots_at(rows, places.flatten()).view_as(places)
    kept.copy_(torch.cat((lengths[:, None], kv_slots), 1))
    is_node, sees = nodes < tree.num_nodes[:, None], tree.ancestors()
    positions = torch.where(is_node, lengths[:, None] + sees.sum(-1) - 2, 0)
    batch = PaddedBatch(
        (lengths - 1).clamp(min=0).repeat_interleave(width),
        rows,
        table.kv_slots,
        *pack_paths(sees, kv_slots.where(is_node, 0)),
        kv_slots.where(is_node, padding_kv_slot).flatten(),
    )
    return TreeInput(tree.tokens.where(is_node, 0).flatten(), positions.flatten(), batch)


def extend_input(
    table: RequestTable,
    slots: Tensor,
    num_kept: Tensor,
    nodes: Tensor,
    width: int,
    padding_kv_slot: int,
    window: int | None = None,
) -> ExtendInput:
    """The input of a draft head, at most `width` tokens for each request; arguments as in PaddedRows."""
    if uses_triton(slots.device):
        from specray.ops.gpu import steps

        parts = (slots, num_kept, nodes, width, table.kv_slots, padding_kv_slot, window)
        return ExtendInput(*steps.extend_input(table.arena, *parts))
    num_rows, num_nodes = nodes.shape
    ends = (table.num_tokens.index_select(0, slots).long() - 1).clamp(min=0)
    depth = torch.arange(width, device=slots.device)
    is_token = depth < num_kept[:, None]
    starts = ends - num_kept
    positions = (starts[:, None] + depth).where(is_token, 0).flatten()
    rows = slots.repeat_interleave(width)
    kv_slots = table.kv_slots_at(rows, positions).view_as(is_token)
    batch = PaddedBatch(
        starts.repeat_interleave(width),
        rows,
        table.kv_slots,
        kv_slots.where(is_token, 0).repeat_interleave(width, 0),
        (depth + 1).repeat(num_rows),
        kv_slots.where(is_token, padding_kv_slot).flatten(),
        window,
    )
    row = torch.arange(num_rows, device=slots.device)
    return ExtendInput(
        table.tokens_at(rows, positions + 1),
        positions,
        batch,
        (row[:, None] * num_nodes + nodes[:, :width]).flatten(),
        row * width + (num_kept - 1).clamp(min=0),
        ends,
        table.tokens_at(slots, ends),
    )
