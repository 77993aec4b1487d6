"""A target's forward pass in one call of the CPU kernels: embedding, decoder layers, norm, output matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.layers.linear import VocabEmbedding, VocabHead
from specray.layers.norm import RMSNorm
from specray.models.target_model import BEFORE_FINAL_NORM, LanguageModel, ModelShape, StepForward
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.attention import PagedAttend, PagedAttention
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.cpu.packed_layers import EmbedAndHead
from specray.ops.cpu.structs import RequestBufferStruct
from specray.ops.cpu.verification import Verification
from specray.ops.step_tensors import LargestLogits


class FusedForward:
    """`TargetModel.step_forward` of a model that the kernels have whole, for steps that their attention plans.

    Aux hidden states have type `dtype`, that of the weights.
    """

    def __init__(self, layers: FusedLayers, around: EmbedAndHead, dtype: torch.dtype) -> None:
        self._layers = layers
        self._around = around
        self._dtype = dtype

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        number, computed = self.start(token_ids, positions, attend, places, aux_hidden_state_layers, only_largest)
        self.wait(number)
        return computed

    def start(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
        verification: Verification | None = None,
        read_lens: Sequence[int] | None = None,
    ) -> tuple[int, tuple[Tensor, Tensor | LargestLogits, list[Tensor]]]:
        """Start a pass; returns its number and its results, which are there after `wait`.

        `read_lens`: of how many of each request's last rows anything but aux hidden states is read, None of all.
        """
        assert isinstance(attend, PagedAttend)
        captured = self._captured(aux_hidden_state_layers)
        # Aux hidden states from after the last layer are those of all rows.
        if max(captured, default=0) >= len(self._layers.structs):
            read_lens = None
        started = self._layers.start_forward(
            self._around,
            token_ids,
            positions,
            attend,
            places,
            captured,
            self._dtype,
            only_largest,
            verification,
            read_lens,
        )
        logits = LargestLogits(started.logits) if only_largest else started.logits
        return started.number, (started.final, logits, self._states(started.copies, aux_hidden_state_layers))

    def begin_after(self, number: int, buffer: RequestBufferStruct, slots: Tensor) -> tuple[int, LargestLogits]:
        """See FusedLayers: the new pass's number, and the tokens that it chooses."""
        started = self._layers.begin_after(self._around, number, buffer, slots)
        return started.number, LargestLogits(started.logits)

    def wait(self, number: int) -> None:
        """Wait for a pass and those before it, and help with them."""
        self._layers.join(number)

    def _captured(self, aux_hidden_state_layers: Sequence[int]) -> list[int]:
        """Which copies the kernels make for these aux hidden states, each of them once."""
        return list(dict.fromkeys(map(self._tap, aux_hidden_state_layers)))

    def _states(self, copies: Tensor, aux_hidden_state_layers: Sequence[int]) -> list[Tensor]:
        """These aux hidden states, from the copies side by side: one tensor, unless a layer is named twice."""
        captured = self._captured(aux_hidden_state_layers)
        if len(captured) == len(aux_hidden_state_layers):
            return [copies] if captured else []
        parts = dict(zip(captured, copies.chunk(len(captured), 1), strict=True))
        return [parts[self._tap(layer)] for layer in aux_hidden_state_layers]

    def _tap(self, aux_hidden_state_layer: int) -> int:
        """Aux hidden states are counted as by TargetModel, copies as by the kernels (Capture in layers.h)."""
        num_layers = len(self._layers.structs)
        after = {BEFORE_FINAL_NORM: num_layers, num_layers: num_layers + 1}
        return after.get(aux_hidden_state_layer, aux_hidden_state_layer)


class FusibleModel(LanguageModel):
    """Base of a TargetModel whose decoder layers, or all of it, may be one call of the CPU kernels."""

    shape: ModelShape
    embedding: VocabEmbedding
    norm: RMSNorm  # of a model with fused layers
    fused: FusedLayers | None = None
    fused_forward: FusedForward | None = None

    def fuse(self, layers: FusedLayers | None, has_plain_head: bool = True) -> None:
        """Run `layers`, which are all of the model's, in one call; with its head if that is a product only."""
        self.fused = layers
        matrix = whole_matrix(self.embedding, self.head)
        if layers is None or matrix is None or not has_plain_head:
            return
        weight, num_columns = self.embedding.weight, self.shape.vocab_size
        around = EmbedAndHead(weight, self.norm.packed, matrix, num_columns, self.head.screen)
        self.fused_forward = FusedForward(layers, around, weight.dtype)

    def step_forward(self, attention: AttentionBackend) -> StepForward:
        """See TargetModel."""
        if self.fused_forward is not None and isinstance(attention, PagedAttention):
            return self.fused_forward
        return super().step_forward(attention)

    def forward_fused(
        self,
        layers: FusedLayers,
        token_ids: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        aux_hidden_state_layers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """TargetModel's call. The final hidden states are float32."""
        embedded = self.embedding(token_ids)
        hidden, dtype, final_layer = embedded.float(), self.embedding.weight.dtype, len(layers.structs)
        captured = sorted({index for index in aux_hidden_state_layers if 0 <= index < final_layer})
        copies = layers(hidden, positions, attend, captured, dtype=dtype)
        final = self.norm(hidden)
        streams = {BEFORE_FINAL_NORM: hidden, final_layer: final}
        streams |= {index: copies.chunk(len(captured), 1)[place] for place, index in enumerate(captured)}
        return final, [streams[index].to(dtype) for index in aux_hidden_state_layers]


def whole_matrix(embedding: VocabEmbedding, head: VocabHead) -> PackedMatrix | None:
    """The output matrix; None if it is not packed, or if it or the embedding is split over ranks."""
    is_whole = embedding.group.size == head.group.size == 1
    return head.run if is_whole and isinstance(head.run, PackedMatrix) else None
