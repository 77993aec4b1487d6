"""How rank 0 shares the trees and the outcome of a step with the other ranks."""

import msgpack
import numpy as np
import torch

from specray.layers.parallel import RankGroup
from specray.spec_decode.draft_tree import DraftTree
from specray.worker.step_output import StepOutput


def broadcast_tree(
    group: RankGroup, tree: DraftTree | None, num_nodes: list[int] | None, device: torch.device
) -> tuple[DraftTree, list[int]]:
    """Rank 0's trees and numbers of nodes on every rank; the others pass None."""
    array, number = None, 0
    if tree is not None:
        array = torch.cat((tree.num_nodes[:, None], tree.tokens, tree.parents), 1).cpu().numpy()
        number = 2 * tree.max_depth + tree.are_chains
    array, number = _broadcast(group, array, number)
    if tree is not None and num_nodes is not None:
        return tree, num_nodes
    packed = torch.from_numpy(array).to(device)
    tokens, parents = packed[:, 1:].chunk(2, 1)
    depth, are_chains = divmod(number, 2)
    return DraftTree(tokens, parents, packed[:, 0], depth, None, bool(are_chains)), array[:, 0].tolist()


def broadcast_output(group: RankGroup, output: StepOutput | None, device: torch.device) -> StepOutput:
    """Rank 0's outcome on every rank, without logprobs; the others pass None."""
    array, _ = _broadcast(group, None if output is None else output.host)
    return output or StepOutput(torch.from_numpy(array).to(device), array, {})


def _broadcast(group: RankGroup, array: np.ndarray | None, number: int = 0) -> tuple[np.ndarray, int]:
    """Rank 0's int64 [n, m] and number on every rank."""
    packed = None if array is None else msgpack.packb((array.shape[1], number, array.tobytes()))
    width, number, data = msgpack.unpackb(group.broadcast_bytes(packed))
    return np.frombuffer(bytearray(data), dtype=np.int64).reshape(-1, width), number
