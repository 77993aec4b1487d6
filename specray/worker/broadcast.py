"""How rank 0 shares the trees and the outcome of a step with the other ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import torch

from specray.layers.parallel import RankGroup
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftSource
from specray.spec_decode.no_drafts import NoDrafts
from specray.worker.step_output import StepOutput


class DraftSizes(NamedTuple):
    """What the shapes of a step's CUDA graphs depend on: see DraftSource."""

    max_draft_tokens: int
    aux_hidden_state_layers: tuple[int, ...]

    @classmethod
    def of(cls, drafts: DraftSource) -> "DraftSizes":
        return cls(drafts.max_draft_tokens, tuple(drafts.aux_hidden_state_layers))


def adopt_sizes(drafts: DraftSource, sizes: DraftSizes) -> None:
    """Choose the same CUDA graphs as rank 0, which has the drafter of these sizes."""
    if isinstance(drafts, NoDrafts):  # as on ranks above 0 that do not draft
        drafts.max_draft_tokens, drafts.aux_hidden_state_layers = sizes


def broadcast_sizes(group: RankGroup, sizes: DraftSizes) -> DraftSizes:
    """Rank 0's sizes on every rank."""
    count, layers = msgpack.unpackb(group.broadcast_bytes(msgpack.packb(sizes) if group.leads else None))
    return DraftSizes(count, tuple(layers))


def broadcast_tree(
    group: RankGroup, tree: DraftTree, num_nodes: Sequence[int], sizes: DraftSizes
) -> tuple[DraftTree, list[int], DraftSizes]:
    """Rank 0's trees, numbers of nodes and sizes on every rank; the others pass any. The host does not read the trees.

    `num_nodes` are those of `tree`, on the host.
    """
    known = num_nodes, tree.tokens.shape[1], tree.max_depth, tree.are_chains, sizes
    data = group.broadcast_bytes(msgpack.packb(known) if group.leads else None)
    counts, width, depth, are_chains, (most, layers) = msgpack.unpackb(data)
    if group.leads:
        packed = torch.cat((tree.num_nodes[:, None], tree.tokens, tree.parents), 1)
    else:
        packed = tree.tokens.new_empty(len(counts), 1 + 2 * width)
    of_trees, tokens, parents = group.broadcast(packed).tensor_split((1, 1 + width), 1)
    if group.leads:
        return tree, counts, sizes
    trees = DraftTree(tokens, parents, of_trees[:, 0], depth, None, are_chains)
    return trees, counts, DraftSizes(most, tuple(layers))


def broadcast_output(group: RankGroup, output: StepOutput | None, device: torch.device) -> StepOutput:
    """Rank 0's outcome on every rank, without logprobs; the others pass None."""
    packed = None if output is None else msgpack.packb(output.host)
    host = msgpack.unpackb(group.broadcast_bytes(packed))
    return output or StepOutput(torch.tensor(host, dtype=torch.int64).to(device), host, {})
