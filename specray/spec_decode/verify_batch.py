"""What the verifier reads and returns for a batch of requests."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops import step_tensors
from specray.ops.sampling_state import SamplingBatch
from specray.outputs import TokenLogprob
from specray.spec_decode.draft_tree import DraftTree


class VerifyOutput(NamedTuple):
    """Outcome of B trees of at most D levels below the root."""

    outcome: Tensor  # int64 [B, 2 + 2 * (D + 1)] on the device: num_tokens twice, tokens, nodes; see StepOutput
    logprobs: Mapping[int, list[TokenLogprob]] = MappingProxyType({})  # logprobs of the requests that want them, by row

    @classmethod
    def of(
        cls,
        num_tokens: Tensor,
        tokens: Tensor,
        nodes: Tensor,
        logprobs: Mapping[int, list[TokenLogprob]] = MappingProxyType({}),
    ) -> "VerifyOutput":
        count = num_tokens[:, None]
        return cls(torch.cat((count, count, tokens, nodes), 1), logprobs)

    @property
    def num_tokens(self) -> Tensor:
        """int64 [B]: accepted drafts and the bonus token; 0: the logits are not finite."""
        return step_tensors.num_kept(self.outcome)

    @property
    def tokens(self) -> Tensor:
        """int64 [B, D + 1]: accepted drafts, then the bonus token; undefined past `num_tokens`."""
        return step_tensors.tokens_of(self.outcome)

    @property
    def nodes(self) -> Tensor:
        """int64 [B, D + 1]: accepted nodes, the root first; undefined past `num_tokens`."""
        return step_tensors.nodes_of(self.outcome)


class VerifyInput(NamedTuple):
    """B trees and the target's logits at their nodes."""

    logits: Tensor  # [sum of num_nodes, V] of any type of floats, requests and nodes in order
    tree: DraftTree
    num_nodes: list[int]  # the host's copy of tree.num_nodes
    sampling: SamplingBatch  # a walk by depth counts emitted tokens in its states
    lengths: Tensor  # int64 [B], known tokens, the root included: the positions of the first tokens to sample
    unmasked: Tensor | None = None  # the logits before a grammar's mask, for logprobs; None: there is no mask

    @property
    def drawn(self) -> SamplingBatch | None:
        """The sampling options; None if all requests are greedy."""
        return self.sampling if any(state.is_sampled for state in self.sampling.states) else None

    def starts(self) -> np.ndarray:
        """int64 [B]: place of each root in `logits`."""
        counts = np.array(self.num_nodes, dtype=np.int64)
        return counts.cumsum() - counts

    def places(self, rows: list[int]) -> Tensor:
        """int64 [nodes of `rows`], on the host: the places of these requests' nodes in `logits`."""
        counts = np.array(self.num_nodes, dtype=np.int64)[rows]
        first = self.starts()[rows] - (counts.cumsum() - counts)
        return torch.from_numpy(np.repeat(first, counts) + np.arange(counts.sum()))

    def select(self, rows: list[int]) -> "VerifyInput":
        """These requests only."""
        index, places = (part.to(self.logits.device) for part in (torch.tensor(rows), self.places(rows)))
        return VerifyInput(
            self.logits.index_select(0, places),
            self.tree.select(index),
            [self.num_nodes[row] for row in rows],
            self.sampling.select(rows),
            self.lengths.index_select(0, index),
            None if self.unmasked is None else self.unmasked.index_select(0, places),
        )


class PaddedVerifyInput(NamedTuple):
    """B trees and the target's logits at their nodes, for CUDA graphs: the host reads nothing."""

    logits: Tensor  # [T, V] of any type of floats, requests and nodes in order, then padding
    tree: DraftTree
    sampling: SamplingBatch | None  # None: all requests are greedy, and the sampler is `coupled`
    lengths: Tensor  # int64 [B], known tokens
    is_sampled: bool  # False: all requests are greedy

    @property
    def drawn(self) -> SamplingBatch | None:
        """The sampling options; None if all requests are greedy."""
        return self.sampling if self.is_sampled else None


def in_order(outputs: Sequence[VerifyOutput], rows: Sequence[int]) -> VerifyOutput:
    """One output of several, whose requests, one output after the other, are number `rows` of the batch."""
    order = torch.tensor(rows).argsort().to(outputs[0].outcome.device)
    outcome = torch.cat([output.outcome for output in outputs]).index_select(0, order)
    starts = accumulate((len(output.outcome) for output in outputs), initial=0)
    logprobs = {
        rows[start + row]: probs
        for start, output in zip(starts, outputs, strict=False)
        for row, probs in output.logprobs.items()
    }
    return VerifyOutput(outcome, logprobs)
