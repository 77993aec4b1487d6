"""The outcome of a step for all requests."""

from collections.abc import Mapping
from typing import NamedTuple

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
    host: list[list[int]]
    logprobs: Mapping[int, list[TokenLogprob]]  # logprobs of the emitted tokens, by row

    @classmethod
    def of(cls, is_finite: Tensor, sampling: Tensor, rows: list[int], verified: VerifyOutput | None) -> "StepOutput":
        """`is_finite` bool [R]; `sampling` int64 are the `rows` that were verified. One copy to the host."""
        width = _NUM_COUNTS + 2 if verified is None else verified.outcome.shape[1]
        outcome = torch.zeros(len(is_finite), width, dtype=torch.int64, device=is_finite.device)
        outcome[:, 0] = 1  # a chunk of a prompt keeps its last token, the root, and emits nothing
        logprobs: Mapping[int, list[TokenLogprob]] = {}
        if verified is not None:
            outcome.index_copy_(0, sampling, verified.outcome)
            logprobs = {rows[row]: probs for row, probs in verified.logprobs.items()}
        outcome[:, :_NUM_COUNTS] *= is_finite[:, None]
        return cls(outcome, outcome.tolist(), logprobs)

    @classmethod
    def of_sampled(cls, verified: VerifyOutput) -> "StepOutput":
        """The output of a step that verified every request. A request without finite logits has 0 tokens."""
        return cls(verified.outcome, verified.outcome.tolist(), verified.logprobs)

    def num_kept(self, row: int) -> int:
        return self.host[row][0]

    def emitted(self, row: int) -> list[int]:
        """The tokens of one row."""
        outcome = self.host[row]
        return outcome[_NUM_COUNTS : _NUM_COUNTS + outcome[1]]

    def accepted_nodes(self, row: int) -> list[int]:
        """The accepted drafts' places in the row's tree."""
        outcome = self.host[row]
        root = 1 + len(outcome) // 2
        return outcome[root + 1 : root + outcome[0]]
