"""The choice of tokens on a GPU, at independent rows or at all nodes of draft trees, and the walk through the trees.

Nothing is read by the host, and shapes depend on the batch's shapes alone, so that CUDA graphs can capture it.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specray.ops.gpu.launches import alike, by_rows
from specray.ops.gpu.noise_kernels import position_keys
from specray.ops.gpu.sampling_kernels import add_noise, choose_among_blocks, choose_in_blocks, find_lowest
from specray.ops.gpu.tree_kernels import walk_tree
from specray.ops.sampling_state import SamplingBatch
from specray.ops.step_tensors import Choices

BLOCK = 4096  # logits of a program; fixed, so that a choice does not depend on the batch
FILTER_BLOCK, PIVOTS = 4096, 4  # of a step of bisection
FILTER_WARPS = 16


class Rows(NamedTuple):
    """The logits to choose from."""

    logits: Tensor  # [M, V] of any type of floats; kernels widen what they read, so that nobody makes a float32 copy
    trees: Tensor | None = None  # int64 [M]: the tree of each row, -1 for padding; None: each row has its own options
    mask: Tensor | None = None  # int32 [M, ceil(V / 32)]: bit i of word j is set if token 32 * j + i is allowed


def sample(logits: Tensor, batch: SamplingBatch | None, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """The next token of each row of logits [n, V], int64 [n]; see `specray.ops.sampling`.

    `keys` int32 [n, 2] are the rows' `noise_keys`. `batch` None: the largest logits. `mask` is that of Rows.
    """
    return choose(Rows(logits.contiguous(), mask=mask), batch, keys).tokens


def choose(rows: Rows, batch: SamplingBatch | None, keys: Tensor | None, first_id: int = 0) -> Choices:
    """The token of each row; `batch` has the options of its trees, `keys` int32 [M, 2] the noise.

    `batch` None: the largest logits. `first_id` is the token id of the first column.
    """
    return _choose(rows, None if batch is None else batch.temperature, keys, first_id, filters=batch)


def choose_drafts(rows: Rows, temperature: Tensor | None, keys: Tensor | None, column_ids: Tensor | None) -> Choices:
    """The draft token of each row, without filters. `temperature` float32 [M], None: the largest logits.

    `column_ids` int64 [V] are the token ids of the columns; None: the same.
    """
    return _choose(rows, temperature, keys, 0, column_ids)


def with_noise(logits: Tensor, temperature: Tensor, keys: Tensor, column_ids: Tensor | None) -> Tensor:
    """Logits [B, nodes, V] over temperature and with noise where requests are sampled; see `TreeNoise.added`.

    `temperature` is float32 [B], `keys` int32 [B, 2]; `column_ids` int64 [V] are those of `choose_drafts`.
    """
    logits, out = logits.contiguous(), torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    num_trees, width, size = logits.shape
    if num_trees:
        add_noise[(num_trees * width, triton.cdiv(size, BLOCK))](
            out,
            logits,
            keys.contiguous(),
            temperature,
            logits if column_ids is None else column_ids,
            size,
            width,
            temperature.stride(0),
            HAS_IDS=column_ids is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


def _choose(
    rows: Rows,
    temperature: Tensor | None,
    keys: Tensor | None,
    first_id: int,
    column_ids: Tensor | None = None,
    filters: SamplingBatch | None = None,
) -> Choices:
    """`temperature` None: the largest logits. `filters` None: nothing is filtered out."""
    logits, trees, mask = rows
    (num_rows, size), device = logits.shape, logits.device
    num_blocks = triton.cdiv(size, BLOCK)
    best, best_ids = torch.empty(2, num_rows, num_blocks, dtype=torch.int32, device=device)
    choices = Choices(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int8, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if not num_rows:
        return choices
    masked = (logits, logits if mask is None else mask)
    sizes = (size, 0 if mask is None else mask.shape[1])
    heat, ids = logits if temperature is None else temperature, logits if column_ids is None else column_ids
    has = {"HAS_MASK": mask is not None, "HAS_IDS": column_ids is not None}

    def choose_in_all_blocks(lowest: Tensor | None) -> None:
        choose_in_blocks[(num_rows, num_blocks)](
            best,
            best_ids,
            *masked,
            logits if trees is None else trees,
            logits if keys is None else keys,
            heat,
            logits if lowest is None else lowest,
            ids,
            first_id,
            *sizes,
            heat.stride(0),
            SAMPLES=temperature is not None,
            FILTERS=lowest is not None,
            HAS_TREES=trees is not None,
            **has,
            BLOCK=BLOCK,
            num_warps=8,
        )

    choose_in_all_blocks(None)
    if filters is not None:
        choose_in_all_blocks(_find_lowest(best, best_ids, rows, filters))
    choose_among_blocks[(num_rows,)](
        *choices,
        best,
        best_ids,
        *masked,
        ids,
        num_blocks,
        first_id,
        *sizes,
        **has,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return choices


def walk_chosen(choices: Choices, tokens: Tensor, parents: Tensor, num_nodes: Tensor, max_depth: int) -> Tensor:
    """Walk draft trees by the tokens chosen at their nodes, tree by tree.

    The arguments behind `choices` are those of DraftTree. Returns the outcome, int64 [B, 2 + 2 * (max_depth + 1)]; see
    VerifyOutput.
    """
    tokens, parents = alike(tokens, parents)
    num_trees, width = tokens.shape
    outcome = torch.empty(num_trees, 2 + 2 * (max_depth + 1), dtype=torch.int64, device=tokens.device)
    if num_trees:
        walk_tree[(num_trees,)](
            outcome,
            choices.tokens.contiguous(),
            choices.is_finite.contiguous(),
            tokens,
            parents,
            num_nodes.contiguous(),
            max_depth,
            tokens.stride(0),
            NODES_PADDED=triton.next_power_of_2(width),
            DEPTHS_PADDED=triton.next_power_of_2(max_depth + 1),
            num_warps=1,
        )
    return outcome


def keys_of_nodes(
    seeds: Tensor, lengths: Tensor, num_nodes: Tensor, parents: Tensor, max_depth: int, total: int
) -> tuple[Tensor, Tensor]:
    """(the `noise_keys` of the tokens after the nodes of draft trees, int32 [total, 2]; their trees, int64 [total]).

    Nodes lie tree by tree; trees behind them, up to B * N, are -1. `seeds` and `lengths` int64 [B] are the requests'
    seeds and known tokens, `num_nodes` [B] and `parents` int64 [B, N] those of DraftTree.
    """
    num_trees, width = parents.shape
    parents = by_rows(parents)
    keys = torch.empty(total, 2, dtype=torch.int32, device=parents.device)
    trees = torch.empty(total, dtype=torch.int64, device=parents.device)
    if num_trees:
        position_keys[(num_trees,)](
            keys,
            trees,
            seeds,
            lengths.contiguous(),
            num_nodes.contiguous(),
            parents,
            max_depth,
            seeds.stride(0),
            parents.stride(0),
            total,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=1,
        )
    return keys, trees


def _find_lowest(best: Tensor, best_ids: Tensor, rows: Rows, batch: SamplingBatch) -> Tensor:
    """float32 [M]: the smallest scaled logit that passes the filters of a row's request.

    `best` and `best_ids` int32 [M, blocks] are the largest scores without filters. Where the largest of all
    passes, as it mostly does, this is minus infinity.
    """
    (num_rows, num_blocks), (logits, trees, mask) = best.shape, rows
    lowest = torch.empty(num_rows, dtype=torch.float32, device=best.device)
    options = (batch.temperature, batch.top_k.contiguous(), batch.top_p, batch.min_p)
    stride = batch.temperature.stride(0)
    assert batch.top_p.stride(0) == batch.min_p.stride(0) == stride, "columns of one table"
    find_lowest[(num_rows,)](
        lowest,
        best,
        best_ids,
        logits,
        logits if mask is None else mask,
        logits if trees is None else trees,
        *options,
        logits.shape[1],
        0 if mask is None else mask.shape[1],
        stride,
        num_blocks,
        HAS_MASK=mask is not None,
        HAS_TREES=trees is not None,
        PIVOTS=PIVOTS,
        BLOCK=FILTER_BLOCK,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        num_warps=FILTER_WARPS,
    )
    return lowest
