"""The interface of EAGLE draft heads: decoder layers over a token's embedding and the hidden states before it.

EAGLE-1 and EAGLE-2 heads are the same network (`eagle2`); EAGLE-3 heads are another (`eagle3`). `eagle_loading` loads
them, `eagle_files` reads their config.json and the names of their tensors, and `specray.spec_decode.eagle` grows trees.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.trees import TreeNetwork

HeadForward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # the type of an EagleHead's call


class EagleHead(Protocol):
    """A draft head of hidden size H.

    A state is the head's summary of everything before a token: from the target's hidden states, or the head's own
    output in deeper draft steps.
    """

    aux_hidden_state_layers: tuple[int, ...]  # of the target, see TargetModel
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vocab_size: int  # columns of `logits`
    draft_token_ids: Tensor | None  # int64 [vocab_size]: target id of each column; None: the same id
    network: TreeNetwork | None  # the same model as a function that grows trees, where the kernels have one
    window: int | None  # positions that a query attends to, its own included; None: all
    reason_without_graphs: str | None  # see `specray.layers.moe`

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """States [T, H] from the target's hidden states [T, aux_hidden_state_layers * target hidden] of any type."""

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the last layer, before any norm; token_ids (of the target) and positions are int64 [T]."""

    def step_forward(self, attention: AttentionBackend) -> HeadForward:
        """The fastest form of `__call__` for the steps that `attention` plans."""

    def recur(self, output: Tensor) -> Tensor:
        """The states of the tokens that are drafted from `output`."""

    def logits(self, output: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: the target's ids of draft ids of any shape."""
