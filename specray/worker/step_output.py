"""The outcome of a step for all requests."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.outputs import TokenLogprob
from specray.spec_decode.verify_batch import VerifyOutput

_NUM_COUNTS = 2  # columns before the tokens


class StepOutput(NamedTuple):
    """Outcome of R requests: int64 [R, 2 + 2 * (D + 1)], on the device and as the host's copy.

    The columns are the number of nodes whose KV is kept (0: the logits are not finite), the number of emitted tokens,
    the tokens, and the kept nodes from the root on.
    """

    device: Tensor
    host: np.ndarray
    logprobs: Mapping[int, list[TokenLogprob]]  # by row

    @classmethod
    def of(cls, is_finite: Tensor, sampling: Tensor, rows: list[int], verified: VerifyOutput | None) -> "StepOutput":
        """`is_finite` bool [R]; `sampling` int64 are the `rows` that were verified. One copy to the host."""
        depth = 1 if verified is None else verified.tokens.shape[1]
        outcome = torch.zeros(len(is_finite), _NUM_COUNTS + 2 * depth, dtype=torch.int64, device=is_finite.device)
        outcome[:, 0] = 1  # a chunk of a prompt keeps its last token, the root, and emits nothing
        logprobs: Mapping[int, list[TokenLogprob]] = {}
        if verified is not None:
            count = verified.num_tokens[:, None]
            outcome.index_copy_(0, sampling, torch.cat((count, count, verified.tokens, verified.nodes), 1))
            logprobs = {rows[row]: probs for row, probs in verified.logprobs.items()}
        outcome[:, :_NUM_COUNTS] *= is_finite[:, None]
        return cls(outcome, outcome.cpu().numpy(), logprobs)

    @classmethod
    def of_sampled(cls, verified: VerifyOutput) -> "StepOutput":
        """The same where every request was verified; its number of tokens is 0 if its logits are not finite."""
        outcome = verified.outcome
        if outcome is None:
            count = verified.num_tokens[:, None]
            outcome = torch.cat((count, count, verified.tokens, verified.nodes), 1)
        return cls(outcome, outcome.cpu().numpy(), verified.logprobs)

    @classmethod
    def of_outcome(cls, outcome: Tensor) -> "StepOutput":
        """The same from a graph's outcome, int64 [R, 2 + 2 * (D + 1)]."""
        return cls(outcome, outcome.cpu().numpy(), {})

    @property
    def num_kept(self) -> Tensor:
        return self.device[:, 0]

    @property
    def num_emitted(self) -> Tensor:
        return self.device[:, 1]

    @property
    def tokens(self) -> Tensor:
        return self.device[:, _NUM_COUNTS : _NUM_COUNTS + self._depth]

    @property
    def nodes(self) -> Tensor:
        return self.device[:, _NUM_COUNTS + self._depth :]

    def emitted(self, row: int) -> list[int]:
        """The tokens of one row, on the host."""
        tokens: list[int] = self.host[row, _NUM_COUNTS : _NUM_COUNTS + self.host[row, 1]].tolist()
        return tokens

    def accepted_nodes(self, row: int) -> list[int]:
        """The accepted drafts' places in the row's tree, on the host."""
        start = _NUM_COUNTS + self._depth
        nodes: list[int] = self.host[row, start + 1 : start + self.host[row, 0]].tolist()
        return nodes

    @property
    def _depth(self) -> int:
        return (self.device.shape[1] - _NUM_COUNTS) // 2
