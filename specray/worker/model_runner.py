"""The target's forward on one rank: with torch's operations and Triton's, or as one call of the CPU kernels."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specray.layers.moe import reason_without_graphs
from specray.models.fused_forward import FusedForward
from specray.models.target_model import TargetModel
from specray.ops.attention import AttentionBackend, recordable
from specray.ops.cpu.structs import RequestBufferStruct
from specray.ops.cpu.verification import Verification
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
        self._forward = model.step_forward(attention)

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
        output = ForwardOutput(*self._forward(*step), batch.roots)
        assert self.states is None or self.states.is_complete
        return output


class KernelRunner(ModelRunner):
    """Passes of the CPU kernels, which run beside the host once they are started."""

    def __init__(self, model: TargetModel, kv: KVCache, attention: AttentionBackend, forward: FusedForward) -> None:
        super().__init__(model, kv, attention)
        self._passes = forward
        self._open: set[int] = set()  # passes that were started and not waited for

    def start(
        self,
        batch: InputBatch,
        aux_hidden_state_layers: Sequence[int],
        only_largest: bool = False,
        verification: Verification | None = None,
    ) -> tuple[int, ForwardOutput]:
        """Start a pass; returns its number, and its output, which is there after `wait`.

        `verification`: the pass verifies its trees, too.
        """
        attend = self.attention.plan(batch.attention)
        step = (batch.token_ids, batch.positions, attend, batch.node_places, aux_hidden_state_layers, only_largest)
        number, computed = self._passes.start(*step, verification, batch.read_lens)
        self._open.add(number)
        return number, ForwardOutput(*computed, batch.roots)

    def begin_after(self, number: int, table: RequestBufferStruct, slots: Tensor) -> tuple[int, ForwardOutput]:
        """Start a pass over the tokens that another one, with only the largest logits, chooses for `slots`."""
        following, logits = self._passes.begin_after(number, table, slots)
        self._open.add(following)
        return following, ForwardOutput(None, logits, [], list(range(slots.shape[0])))

    def wait(self, number: int) -> None:
        """Wait for a pass that was started."""
        self._passes.wait(number)
        self._open.discard(number)

    def __del__(self) -> None:
        for number in sorted(self._open):  # before the weights that a pass reads, and the KV that it writes, are freed
            self._passes.wait(number)


def make_runner(
    model: TargetModel, kv: KVCache, attention: AttentionBackend, states: StatePool | None = None
) -> ModelRunner:
    """The runner of the CPU kernels, where they have the whole model: one without states."""
    forward = model.step_forward(attention)
    if isinstance(forward, FusedForward):
        assert states is None
        return KernelRunner(model, kv, attention, forward)
    return ModelRunner(model, kv, attention, states)
