"""Draft trees made from others: a batch with some trees replaced, and trees without their deepest levels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree


def replace_trees(others: DraftTree, places: Tensor, trees: DraftTree) -> DraftTree:
    """`others` with tree `places[i]` (int64 [B], ascending and each once) replaced by row i of `trees`."""
    if len(places) == len(others.num_nodes):
        return trees
    width = max(trees.tokens.shape[1], others.tokens.shape[1])

    def merge(ours: Tensor, theirs: Tensor) -> Tensor:
        padded, rows = (F.pad(part, (0, width - part.shape[1]), value=NONE) for part in (theirs, ours))
        return padded.index_copy(0, places, rows)

    scores = None
    if trees.scores is not None or others.scores is not None:  # without scores, all nodes are wanted
        scores = merge(
            *(torch.ones_like(t.tokens, dtype=torch.float32) if t.scores is None else t.scores for t in (trees, others))
        )

    probs = None if others.draft_probs is None else others.draft_probs.index_fill(0, places, 0.0)
    if trees.draft_probs is not None:
        probs = trees.draft_probs.new_zeros(len(others.num_nodes), *trees.draft_probs.shape[1:])
        probs.index_copy_(0, places, trees.draft_probs)
    return DraftTree(
        merge(trees.tokens, others.tokens),
        merge(trees.parents, others.parents),
        others.num_nodes.index_copy(0, places, trees.num_nodes),
        max(trees.max_depth, others.max_depth),
        probs,
        scores=scores,
    )


def limit_depth(tree: DraftTree, num_steps: Tensor) -> DraftTree:
    """The trees without nodes deeper than `num_steps` int64 [B]. The other nodes keep their order."""
    depths = tree.ancestors().sum(-1) - 1
    nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    keep = (depths <= num_steps[:, None]) & (nodes < tree.num_nodes[:, None])
    order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)
    places = keep.cumsum(-1) - 1  # of the nodes that are kept
    num_nodes = keep.sum(-1)
    parents = tree.parents.gather(1, order)
    parents = torch.where(parents < 0, parents, places.gather(1, parents.clamp(min=0)))
    is_past = nodes >= num_nodes[:, None]
    tokens = tree.tokens.gather(1, order).masked_fill(is_past, NONE)
    probs = tree.draft_probs
    if probs is not None:
        probs = probs.gather(1, order[:, :, None].expand(-1, -1, probs.shape[-1]))
    scores = None if tree.scores is None else tree.scores.gather(1, order)
    return DraftTree(tokens, parents.masked_fill(is_past, NONE), num_nodes, tree.max_depth, probs, scores=scores)
