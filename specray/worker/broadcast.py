"""How rank 0 shares the trees and the outcome of a step with the other ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import numpy as np
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
    group: RankGroup, tree: DraftTree, num_nodes: list[int], sizes: DraftSizes
) -> tuple[DraftTree, list[int], DraftSizes]:
    """Rank 0's trees, numbers of nodes and sizes on every rank; the others pass any."""
    array, numbers = None, [0, 0, 0]
    if group.leads:
        array = torch.cat((tree.num_nodes[:, None], tree.tokens, tree.parents), 1).cpu().numpy()
        numbers = [tree.max_depth, int(tree.are_chains), sizes.max_draft_tokens, *sizes.aux_hidden_state_layers]
    array, (depth, are_chains, most, *layers) = _broadcast(group, array, numbers)
    if group.leads:
        return tree, num_nodes, sizes
    packed = torch.from_numpy(array).to(tree.tokens.device)
    tokens, parents = packed[:, 1:].chunk(2, 1)
    trees = DraftTree(tokens, parents, packed[:, 0], depth, None, bool(are_chains))
    return trees, array[:, 0].tolist(), DraftSizes(most, tuple(layers))


def broadcast_output(group: RankGroup, output: StepOutput | None, device: torch.device) -> StepOutput:
    """Rank 0's outcome on every rank, without logprobs; the others pass None."""
    array, _ = _broadcast(group, None if output is None else np.array(output.host, dtype=np.int64))
    return output or StepOutput(torch.from_numpy(array).to(device), array.tolist(), {})


def _broadcast(group: RankGroup, array: np.ndarray | None, numbers: Sequence[int] = ()) -> tuple[np.ndarray, list[int]]:
    """Rank 0's int64 [n, m] and numbers on every rank."""
    packed = None if array is None else msgpack.packb((array.shape[1], numbers, array.tobytes()))
    width, found, data = msgpack.unpackb(group.broadcast_bytes(packed))
    return np.frombuffer(bytearray(data), dtype=np.int64).reshape(-1, width), found
