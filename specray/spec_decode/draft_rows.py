"""The requests that a draft model reads and drafts for, in a form that hides how many tokens the host knows.

A drafter with a model does its work on the device once, in `draft(rows)`. The rows of an ordinary step have lengths
that the host knows, and keys that it has chosen (`scheduled_rows`). Those of a CUDA graph have fixed shapes, and their
padding is the backend's own affair (`specray.worker.padded_rows`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specray.models.heads.block_files import BlockMask
from specray.ops.attention import Attend, AttentionBackend
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


@dataclass(eq=False)
class DraftKV:
    """A draft model's KV, which lies in the target's KV slots and in scratch slots behind them."""

    attention: AttentionBackend
    shape: TreeShape  # shape of the largest trees
    last_position: int  # last position of the model; a node behind it is computed there, but never verified
    padding_slot: int  # the last KV slot of the pool, which padding writes and nobody reads
    # int64 [max_rows, topk * (num_steps - 1)], KV slots of a request's nodes, level after level; None: trees grow
    # without KV
    nodes: Tensor | None
    # int64 [max_rows, m], KV slots of tokens that are read behind the committed ones; None: there are none
    extra: Tensor | None = None
    reads_next_token: bool = True  # the model pairs a position with the token behind it
    num_layers: int = 1  # layers with KV of their own positions: layer k has none at the first k of a text

    def __post_init__(self) -> None:
        # Made once, so that a CUDA graph need not: KV slots [max_rows, topk] and depths [max_rows] of each level's
        # nodes but the first's.
        starts = range(0, 0 if self.nodes is None else self.nodes.shape[1], self.shape.topk)
        self.levels = [self.nodes[:, start : start + self.shape.topk].contiguous() for start in starts]  # type: ignore[index]
        self.depths = [
            torch.full((len(level),), depth, device=level.device) for depth, level in enumerate(self.levels, 1)
        ]


class Extras(NamedTuple):
    """Which of T tokens are read behind the committed ones."""

    are_extra: Tensor  # bool [T]
    known: Tensor  # int64 [T]: place of a committed token among those; undefined for the others


class ReadTokens(NamedTuple):
    """The T tokens of B requests that a draft model reads before trees grow."""

    token_ids: Tensor  # int64 [T], as `DraftKV.reads_next_token` says
    positions: Tensor  # int64 [T]
    written: Tensor  # int64 [T], the KV slots that are written
    attend: Attend
    last: Tensor  # int64 [B, 1 + m], places among the T: each request's last committed token, then its m extra ones
    before: Callable[[], Tensor]  # int64 [T], the KV slots of the positions before
    extras: Extras | None = None  # None: there are no extra tokens
    read_lens: Sequence[int] | None = None  # how many last tokens of each request are read; None: any


class ReadBlocks(NamedTuple):
    """The T tokens that a step committed, and the B blocks of rows behind them."""

    positions: Tensor  # int64 [T]
    written: Tensor  # int64 [T], KV slots of these positions
    block_positions: Tensor  # int64 [B * rows]
    attend: Attend  # of the rows of the blocks, once the KV of the committed tokens is written


AttendLevel = Callable[[int, Tensor], Attend]


class DraftRows(Protocol):
    """B requests that get a tree; others may be read with them."""

    @property
    def count(self) -> int:
        """B, or less than B rows of padding."""

    @property
    def slots(self) -> Tensor:
        """int64 [B], of the request table."""

    @property
    def ends(self) -> Tensor:
        """int64 [B], positions of the last known tokens, the roots."""

    @property
    def roots(self) -> Tensor:
        """int64 [B], these tokens."""

    def aux_hidden_states(self) -> Tensor:
        """The target's, [T without extra tokens, len(aux_hidden_state_layers) * hidden], of the tokens to read."""

    def kv_slots_at(self, positions: Tensor) -> Tensor:
        """int64 [B], the target's KV slot of one position of each request."""

    def read(self, kv: DraftKV, layer: int = 0, num_extra: int = 0) -> ReadTokens | None:
        """What `layer` reads, with `num_extra` tokens behind those of each request that gets a tree.

        None if it reads nothing.
        """

    def read_blocks(self, kv: DraftKV, masks: Sequence[BlockMask]) -> ReadBlocks:
        """The committed tokens, and for each request that gets a tree a block of rows in all its `kv.extra` KV slots.

        `masks` has one for each layer. The first row of a block is the root, at position `ends`.
        """

    def levels(self, kv: DraftKV, shape: TreeShape) -> AttendLevel:
        """The attention of the trees' levels, as (level from 1 on, `sees` bool [B, topk, level * topk]) -> Attend.

        A node attends to the KV before its tree, extra tokens of `read` included, and to the nodes that it `sees`.
        """

    def limited(self, shape: TreeShape) -> TreeShape:
        """`shape` within the requests' limits, as far as the host knows them."""

    def noise(self, num_levels: int) -> TreeNoise | None:
        """The target's noise; None if all requests are greedy."""


def block_positions(ends: Tensor, blocks: Tensor, last_position: int) -> Tensor:
    """int64 [B * rows] of the rows of `blocks` [B, rows] from `ends` [B] on, up to the last one."""
    return (ends[:, None] + torch.arange(blocks.shape[1], device=ends.device)).clamp(max=last_position).flatten()


def by_layer(plans: Sequence[Attend]) -> Attend:
    """One Attend for all layers: layer i uses plan i; a single plan is used by all layers."""
    return plans[0] if len(plans) == 1 else lambda layer, q, kv: plans[layer](layer, q, kv)
