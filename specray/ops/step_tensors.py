"""Tensors of a step as kernels and torch's operations take them: requests, waiting trees, results, rows of any length.

The outcome of a step, int64 [R, 2 + 2 * (D + 1)], is what it committed of R requests; see StepOutput.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Choices(NamedTuple):
    """Tokens of n rows."""

    tokens: Tensor  # int64
    is_finite: Tensor  # int8: whether the token's logit is finite
    scores: Tensor  # int32, in the order of the tokens' scores; NaN is the largest


class TreeTensors(NamedTuple):
    """The tensors of DraftTree, of B trees or by slot."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor  # int64 [B, N]
    num_nodes: Tensor  # int64 [B]
    scores: Tensor | None  # float32 [B, N]; None: not known


class TreesWanted(NamedTuple):
    """Which trees a step takes, int64 [B] each but the last."""

    slots: Tensor
    roots: Tensor  # the requests' last known tokens
    most: Tensor  # nodes that each tree may have
    least: Tensor | None  # float32 [B], score that a node needs; None: no node is cut for its score


class RequestBuffer(NamedTuple):
    """A row of `row_size` int32 cells for each slot: token ids from column 0 on, KV slots from `kv_column` on."""

    cells: Tensor  # int32 [slots * row_size]
    row_size: int
    kv_column: int
    length_column: int  # column of the number of known tokens


class LargestLogits(NamedTuple):
    """The token of the largest logit of each of n rows, in place of the logits, for steps that need no more."""

    token_ids: Tensor  # int64 [n]; -1 where logits are not finite


class RaggedIndex(NamedTuple):
    """T elements of concatenated rows: element t is number `offsets[t]` of row `rows[t]`, or padding behind it."""

    rows: Tensor  # int64 [T]
    offsets: Tensor  # int64 [T]

    @classmethod
    def of(cls, lengths: Tensor, total: int) -> "RaggedIndex":
        """From the rows' `lengths` int64 [rows], at most `total` in all; what follows them goes on in the last row."""
        ends, place = lengths.cumsum(0), torch.arange(total, device=lengths.device)
        rows = torch.searchsorted(ends, place, right=True).clamp(max=len(lengths) - 1)
        return cls(rows, place - (ends - lengths).index_select(0, rows))


def ragged_places(lengths: Tensor, width: int, total: int) -> Tensor:
    """int64 [rows, `width`], where the elements of rows of `lengths` are, concatenated; anywhere where there is none.

    `total` is that of RaggedIndex.
    """
    offsets = torch.arange(width, device=lengths.device)
    return ((lengths.cumsum(0) - lengths)[:, None] + offsets).clamp(max=total - 1)


def num_kept(outcome: Tensor) -> Tensor:
    """int64 [R], nodes whose KV is kept."""
    return outcome[:, 0]


def num_emitted(outcome: Tensor) -> Tensor:
    """int64 [R], tokens."""
    return outcome[:, 1]


def tokens_of(outcome: Tensor) -> Tensor:
    """int64 [R, D + 1]; undefined past `num_emitted`."""
    return outcome[:, 2 : 1 + outcome.shape[1] // 2]


def nodes_of(outcome: Tensor) -> Tensor:
    """int64 [R, D + 1], the root first; undefined past `num_kept`."""
    return outcome[:, 1 + outcome.shape[1] // 2 :]
