"""Samplers choose the token at a node of a draft tree; `verifier` walks the tree.

`coupled` is the default and ignores the drafts. The other samplers live in `rejection`, `thresholds` and `simulation`;
`samplers` selects the configured one.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from specray.ops.sampling import sample
from specray.ops.sampling_state import SamplingBatch
from specray.spec_decode.draft_tree import DraftTree


class NodeBatch(NamedTuple):
    """One node of each of n requests, all `depth` levels below their roots."""

    logits: Tensor  # float32 [n, V], read only; not finite in requests that fail
    sampling: SamplingBatch
    positions: Tensor  # int64 [n], of the tokens to choose
    keys: Tensor  # int32 [n, 2], the `noise_keys` of these positions
    siblings: Tensor  # int64 [n, C], tokens drafted below the node, best first, each once; -1 past the last
    draft_probs: Tensor | None  # float32 [n, up to V]: the distribution siblings were drawn from; zeros: not drawn
    depth: int


class NodeSampler(Protocol):
    """The token after each node."""

    def __call__(self, nodes: NodeBatch) -> Tensor:
        """int64 [n]"""


@runtime_checkable
class PaddedSampler(Protocol):
    """A NodeSampler that can also choose at all nodes at once, without the host."""

    def at_nodes(self, chosen: Tensor, tree: DraftTree, seeds: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
        """int64 [B, N], the tokens after all nodes, from `chosen` [B, N], those that `coupled` chooses.

        `seeds` and `lengths`, known tokens, are int64 [B].
        """


def coupled(nodes: NodeBatch) -> Tensor:
    """The token that the target samples with the request's noise for this position, with or without drafts."""
    return sample(nodes.logits, nodes.sampling, nodes.keys)
