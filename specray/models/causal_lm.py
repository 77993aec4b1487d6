"""What all target models share: the stack of decoder layers, and the loop over them.

`CausalLM` implements `TargetModel`; a subclass defines the attention and, if it is not the dense one, the feed-forward
of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.layers.compiled import CompiledLayers
from specray.layers.linear import VocabEmbedding, VocabHead
from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.decoder_layer import DecoderLayer, FeedForward
from specray.models.fused_forward import FusibleModel
from specray.models.loading import EMBEDDING, Loader
from specray.models.target_model import BEFORE_FINAL_NORM, ModelShape
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.layer_attention import LayerAttention


class CausalLM(FusibleModel):
    """A stack of decoder layers over one flattened batch [T, hidden]; `attend` knows rows, trees and the KV pool."""

    can_round_kv = True  # whether KV may be int8, with one scale for each row of a head
    expanded: tuple[str, ...] = ()  # name suffixes of the matrices that are expanded from a quantised checkpoint

    def __init__(self, config: PretrainedConfig, loader: Loader, max_positions: int) -> None:
        super().__init__()
        shape = self.shape_of(config, loader.group)
        vocab = (shape.vocab_size, shape.hidden_size)
        output = loader.output_name(shape.tied)
        self.shape = replace(shape, tied=output == EMBEDDING)
        self.embedding = VocabEmbedding(loader.vocab(EMBEDDING, vocab), loader.group)
        self.layers = nn.ModuleList(
            self.layer(config, loader, f"model.layers.{index}.", index) for index in range(shape.num_layers)
        )
        self.norm = RMSNorm(loader.tensor("model.norm.weight", (shape.hidden_size,)), shape.eps, loader.group)
        head = loader.vocab_weight(output, vocab)
        is_screened = loader.screens_output and loader.group.size == 1
        self.head = VocabHead(head, shape.vocab_size, loader.group, loader.quantization, is_screened)
        self.max_positions = max_positions
        self.rotary = self.rotary_of(config, loader, max_positions)
        self.layer_attention: Sequence[LayerAttention] | None = None  # set by the loader, like the next
        self.is_row_wise = False
        self.compiled: CompiledLayers | None = None  # set by `specray.models.compilation`

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> ModelShape:
        raise NotImplementedError

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, loader: Loader, max_positions: int) -> RotaryEmbedding:
        head_dim = cls.shape_of(config, loader.group).head_dim
        return RotaryEmbedding(config, head_dim, max_positions, loader.dtype, loader.device)

    @classmethod
    def layer(
        cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int, kv_layer: int | None = None
    ) -> DecoderLayer:
        """Layer `index` from tensors `prefix`*. Its KV is layer `kv_layer` of the pool, by default layer `index`."""
        attention = cls.attention(config, loader, prefix + "self_attn.", index if kv_layer is None else kv_layer)
        return DecoderLayer(config, loader, prefix, attention, cls.feed_forward(config, loader, prefix, index))

    @classmethod
    def attention(cls, config: PretrainedConfig, loader: Loader, prefix: str, kv_layer: int) -> Layer:
        """Module of (normed states [T, hidden], cos, sin, attend) -> this rank's part of [T, hidden]."""
        raise NotImplementedError

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:  # noqa: ARG003
        """Module of normed states [T, hidden] -> this rank's part of [T, hidden]; dense unless overridden."""
        return FeedForward(config.hidden_size, config.intermediate_size, loader, prefix + "mlp.")

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, aux_hidden_state_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See TargetModel."""
        if self.fused is not None and isinstance(attend, PagedAttend):
            return self.forward_fused(self.fused, token_ids, positions, attend, aux_hidden_state_layers)
        hidden = self.embedding(token_ids)
        cos, sin = self.rotary.at(positions)
        # Only the requested states: those of all layers of a long prompt take gigabytes.
        aux_hidden_states: dict[int, Tensor] = {}
        indexes = (*range(len(self.layers)), BEFORE_FINAL_NORM, len(self.layers))
        for index, state in zip(indexes, self._states(hidden, cos, sin, attend), strict=True):
            if index in aux_hidden_state_layers:
                aux_hidden_states[index] = state
        return state, [aux_hidden_states[index] for index in aux_hidden_state_layers]

    def _states(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Iterator[Tensor]:
        """The residual stream that enters each layer, the one that leaves the last, and its norm."""
        if self.compiled is not None and self.compiled.takes(len(hidden)):
            for stream in self.compiled(hidden, cos, sin, attend):
                yield stream
            yield self.norm(stream)
            return
        layers = cast("Sequence[DecoderLayer]", self.layers)
        norms = [*(layer.input_norm for layer in layers), self.norm]
        normed = norms[0](hidden)
        for layer, norm in zip(layers, norms[1:], strict=True):
            yield hidden
            normed, hidden = layer.attended(normed, hidden, cos, sin, attend)
            normed, hidden = norm.after_add(layer.ffn(normed), hidden)  # one launch on a GPU
        yield hidden
        yield normed
