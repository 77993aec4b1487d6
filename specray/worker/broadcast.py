"""How rank 0 shares the trees and the outcome of a step with the other ranks."""

from collections.abc import Sequence

import msgpack
import torch

from specray.layers.parallel import RankGroup
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftSource, UnsizedTrees
from specray.spec_decode.no_drafts import NoDrafts
from specray.worker.step_output import StepOutput


def share_sizes(group: RankGroup, drafts: DraftSource) -> None:
    """Choose the same CUDA graphs as rank 0 on every rank."""
    _adopt(drafts, *msgpack.unpackb(group.broadcast_bytes(msgpack.packb(_sizes(drafts)) if group.leads else None)))


def share_trees(
    group: RankGroup, drafts: DraftSource, tree: DraftTree, num_nodes: Sequence[int]
) -> tuple[DraftTree, list[int]]:
    """Rank 0's trees and numbers of nodes on every rank, with its sizes. The others pass any.

    `num_nodes` are those of `tree` on the host, which does not read the trees, or upper bounds. Without any there are
    no trees.
    """
    known = num_nodes, tree.tokens.shape[1], tree.max_depth, tree.are_chains, _sizes(drafts)
    data = group.broadcast_bytes(msgpack.packb(known) if group.leads else None)
    counts, width, depth, are_chains, sizes = msgpack.unpackb(data)
    _adopt(drafts, *sizes)
    if not counts:
        return tree, counts
    if group.leads:
        packed = torch.cat((tree.num_nodes[:, None], tree.tokens, tree.parents), 1)
    else:
        packed = tree.tokens.new_empty(len(counts), 1 + 2 * width)
    of_trees, tokens, parents = group.broadcast(packed).tensor_split((1, 1 + width), 1)
    if group.leads:
        return tree, counts
    return DraftTree(tokens, parents, of_trees[:, 0], depth, None, are_chains), counts


def share_drafted(
    group: RankGroup, drafts: DraftSource, drafted: UnsizedTrees | None, other: DraftTree
) -> UnsizedTrees | None:
    """Rank 0's trees of a step that begins early on every rank; None if it verifies none. `other`: any trees.

    A drafter that is late or gone has cost rank 0's trees their drafts before they are sent, so ranks agree on it.
    """
    tree, most_nodes = (other, []) if drafted is None else drafted[:2]
    tree, most_nodes = share_trees(group, drafts, tree, most_nodes)
    if drafted is None and most_nodes:
        return UnsizedTrees(tree, most_nodes, lambda: (tree, most_nodes))  # rank 0 alone reports the sizes
    return drafted


def broadcast_output(group: RankGroup, output: StepOutput | None, device: torch.device) -> StepOutput:
    """Rank 0's outcome on every rank, without logprobs; the others pass None."""
    packed = None if output is None else msgpack.packb(output.host)
    host = msgpack.unpackb(group.broadcast_bytes(packed))
    return output or StepOutput(torch.tensor(host, dtype=torch.int64).to(device), host, {})


def _sizes(drafts: DraftSource) -> tuple[int, Sequence[int]]:
    """What the shapes of a step's CUDA graphs depend on: see DraftSource."""
    return drafts.max_draft_tokens, drafts.aux_hidden_state_layers


def _adopt(drafts: DraftSource, max_draft_tokens: int, layers: Sequence[int]) -> None:
    """The `_sizes` of rank 0's drafter."""
    if isinstance(drafts, NoDrafts):  # as on ranks above 0 that do not draft
        drafts.max_draft_tokens, drafts.aux_hidden_state_layers = max_draft_tokens, tuple(layers)
