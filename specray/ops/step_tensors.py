"""Tensors of a step as kernels and torch's operations take them: the request table, trees that wait, largest logits."""

from typing import NamedTuple

from torch import Tensor


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
    length_column: int  # of the number of known tokens


class LargestLogits(NamedTuple):
    """The token of the largest logit of each of n rows, in place of the logits, for steps that need no more."""

    token_ids: Tensor  # int64 [n]; -1 where logits are not finite
