"""The target's forward on one rank."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specray.layers.moe import reason_without_graphs
from specray.models.target_model import TargetModel
from specray.ops.attention import AttentionBackend, recordable
from specray.ops.step_tensors import LargestLogits
from specray.worker.input_batch import InputBatch
from specray.worker.kv_cache import KVCache
from specray.worker.state_pool import StatePool


class ForwardOutput(NamedTuple):
    """The output of a forward pass over T tokens."""

    # [T, hidden], after the final norm, where InputBatch.read_lens says so; None in a graph, and of a pass that follows
    # another one
    hidden: Tensor | None
    # float32 [M, V], of the nodes of the rows that sample; None if a graph verifies them
    logits: Tensor | LargestLogits | None
    aux_hidden_states: list[Tensor]  # each [T, any], to be concatenated
    roots: list[int]  # places of the rows' roots among the T tokens


class ModelRunner:
    """The model, its KV pool, the states of its requests and its attention kernels."""

    def __init__(
        self, model: TargetModel, kv: KVCache, attention: AttentionBackend, states: StatePool | None = None
    ) -> None:
        """`states`: None for a model whose layers all have KV."""
        self.model = model
        self.kv = kv
        self.states = states
        self.attention = attention
        self.forward = model.step_forward(attention)

    @property
    def reason_without_graphs(self) -> str | None:
        """Why decode steps cannot be CUDA graphs; None if they can."""
        if recordable(self.attention) is None:
            return "this attention_backend plans every step on the host; set it to triton"
        return reason_without_graphs(self.model)

    def run(
        self, batch: InputBatch, aux_hidden_state_layers: Sequence[int], only_largest: bool = False
    ) -> ForwardOutput:
        """One pass. `only_largest`: see `TargetModel.with_logits`."""
        attend = self.attention.plan(batch.attention)
        if self.states is not None:
            attend = self.states.attending(attend)
        step = (batch.token_ids, batch.positions, attend, batch.node_places, aux_hidden_state_layers, only_largest)
        output = ForwardOutput(*self.forward(*step), batch.roots)
        assert self.states is None or self.states.is_complete
        return output
