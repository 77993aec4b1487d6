"""What the worker and the drafters know of a target: its sizes, and its forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from torch import Tensor, nn

from specray.layers.linear import VocabEmbedding, VocabHead
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.layer_attention import LayerAttention
from specray.ops.states import StateShape
from specray.ops.step_tensors import LargestLogits

BEFORE_FINAL_NORM = -1  # an index of aux hidden states, see TargetModel

# The type of `TargetModel.with_logits`.
StepForward = Callable[
    [Tensor, Tensor, Attend, Tensor | None, Sequence[int], bool], tuple[Tensor, Tensor | LargestLogits, list[Tensor]]
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that every model has. Heads are counted as this rank's KV pool and attention kernels see them."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    eps: float
    tied: bool
    num_local_heads: int
    num_local_kv_heads: int
    head_dim: int
    _: KW_ONLY
    num_shared_kv_layers: int = 0  # layers that read the KV of a layer before them
    num_state_layers: int = 0  # layers that have states instead of KV
    states: tuple[StateShape, ...] = ()  # of a request, one for each operation with states, in the order of a pass

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pool."""
        return self.num_layers - self.num_shared_kv_layers - self.num_state_layers

    @property
    def state_bytes(self) -> int:
        """Of a request, beside its KV."""
        return sum(state.num_bytes for state in self.states)


class TargetModel(Protocol):
    """A model with its weights on this rank."""

    embedding: VocabEmbedding
    head: VocabHead
    max_positions: int
    is_row_wise: bool  # apart from attention, a row's result has the same bits whatever the other rows are

    can_round_kv: bool  # whether its KV may lie in a pool in int8
    layer_attention: Sequence[LayerAttention] | None  # of the pool's layers; None: all attend in the default way

    @property
    def shape(self) -> ModelShape: ...

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, aux_hidden_state_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """(hidden states after the final norm, aux hidden states), each [T, hidden]; inputs are int64 [T].

        The aux hidden state of layer i is the residual stream that enters it, that of BEFORE_FINAL_NORM the one that
        leaves the last layer, and that of layer `num_layers` the hidden states after the final norm.
        """

    def logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab] from final hidden states [n, hidden]."""

    def with_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        """(final hidden states, logits of the rows `places` int64 [n] or of all, aux hidden states).

        The logits are those of `VocabHead.shard`. With `only_largest` they may be LargestLogits, or logits of
        which only each row's largest is exact, bit for bit; the others are approximate, and smaller.
        """

    def step_forward(self, attention: AttentionBackend) -> StepForward:
        """`with_logits` for the steps that `attention` plans, chosen once.

        A FusedForward can also start a pass and return before its results are there.
        """


class LanguageModel(nn.Module):
    """Base of a TargetModel whose `head` turns its final hidden states into logits."""

    head: VocabHead

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See TargetModel."""
        return self.head(hidden_states)

    def with_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        """See TargetModel."""
        final, states = self(token_ids, positions, attend, aux_hidden_state_layers)
        rows = final if places is None else final.index_select(0, places)
        return final, self.head.shard(rows, only_largest), states

    def step_forward(self, attention: AttentionBackend) -> StepForward:  # noqa: ARG002
        """See TargetModel."""
        return self.with_logits
