"""The target's forward on one rank."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specray.layers.moe import reason_without_graphs
from specray.models.fused_forward import FusedForward
from specray.models.target_model import TargetModel
from specray.ops.attention import AttentionBackend, PaddedAttention
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.verification import Verification
from specray.ops.likeliest import LargestLogits
from specray.worker.input_batch import InputBatch
from specray.worker.kv_cache import KVCache


class ForwardOutput(NamedTuple):
    """What a forward pass over T tokens returns."""

    # [T, hidden], after the final norm, where InputBatch.read_lens says so; None in a graph, and of a pass that follows
    # another one
    hidden: Tensor | None
    # float32 [M, V], of the nodes of the rows that sample; None if a graph verifies them
    logits: Tensor | LargestLogits | None
    aux_hidden_states: list[Tensor]  # each [T, any], to be concatenated
    roots: list[int]  # places of the rows' roots among the T tokens; empty if each row has the nodes of its tree only
    number: int | None = None  # of a pass that may still run
    verification: Verification | None = None  # by the pass: its outcome is there after `wait`


class ModelRunner:
    """The model, its KV pool and its attention kernels."""

    def __init__(self, model: TargetModel, kv: KVCache, attention: AttentionBackend) -> None:
        self._open: set[int] = set()  # passes that were started and not waited for
        self.model = model
        self.kv = kv
        self.attention = attention
        self._forward = model.step_forward(attention)

    @property
    def starts_passes(self) -> bool:
        """Whether `start` returns while the pass still runs."""
        return isinstance(self._forward, FusedForward) or self.model.embedding.weight.device.type != "cpu"

    @property
    def reason_without_graphs(self) -> str | None:
        """Why decode steps cannot be CUDA graphs; None if they can."""
        if not isinstance(self.attention, PaddedAttention):
            return "this attention_backend plans every step on the host; set it to triton"
        return reason_without_graphs(self.model)

    @property
    def can_verify(self) -> bool:
        """Whether a pass can verify its trees."""
        return isinstance(self._forward, FusedForward)

    def start(
        self,
        batch: InputBatch,
        aux_hidden_state_layers: Sequence[int],
        only_largest: bool = False,
        verification: Verification | None = None,
    ) -> ForwardOutput:
        """Start a pass; its output is there after `wait`. `only_largest`: see `TargetModel.with_logits`."""
        attend = self.attention.plan(batch.attention)
        step = (batch.token_ids, batch.positions, attend, batch.node_places, aux_hidden_state_layers, only_largest)
        if isinstance(self._forward, FusedForward):
            number, computed = self._forward.start(*step, verification, batch.read_lens)
            self._open.add(number)
            return ForwardOutput(*computed, batch.roots, number, verification)
        return ForwardOutput(*self._forward(*step), batch.roots)

    def follow(self, output: ForwardOutput, table: TableKernels, slots: Tensor) -> ForwardOutput:
        """Start a pass over the tokens that the pass of `output`, with only the largest logits, chooses for `slots`."""
        assert output.number is not None
        assert isinstance(self._forward, FusedForward)
        number, logits = self._forward.follow(output.number, table.struct, slots)
        self._open.add(number)
        return ForwardOutput(None, logits, [], list(range(slots.shape[0])), number)

    def wait(self, output: ForwardOutput) -> None:
        """Wait for a pass that was started, unless the device orders what follows."""
        if output.number is not None:
            assert isinstance(self._forward, FusedForward)
            self._forward.wait(output.number)
            self._open.discard(output.number)

    def __del__(self) -> None:
        for number in sorted(self._open):  # before the weights that a pass reads, and the KV that it writes, are freed
            assert isinstance(self._forward, FusedForward)
            self._forward.wait(number)
