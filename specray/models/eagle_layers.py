"""The decoder layers of an EAGLE head."""

import torch
from torch import Tensor

from specray.layers.norm import RMSNorm
from specray.layers.rotary import RotaryEmbedding
from specray.models.decoder_layer import FeedForward
from specray.models.eagle_files import TensorNames
from specray.models.fused import fused
from specray.models.llama import Attention
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend


class EagleLayers:
    """The head's layers: a first one that reads `width` columns, and in some heads ordinary decoder layers after it."""

    def __init__(
        self, shape: LlamaShape, loader: Loader, names: TensorNames, width: int, rotary: RotaryEmbedding
    ) -> None:
        first, *others = names.layers(shape.num_layers)
        size = shape.hidden_size
        self._first = _Layer(0, shape, loader, first, width)
        self._norms = [RMSNorm(loader.tensor(other + "input_layernorm.weight", (size,)), shape.eps) for other in others]
        self._others = [_Layer(index, shape, loader, other, size) for index, other in enumerate(others, 1)]
        self._rotary = rotary
        layers = zip((None, *self._norms), (self._first, *self._others), strict=True)
        self.fused = fused(
            [(norm, layer.attention, layer.ffn_norm, layer.ffn) for norm, layer in layers], rotary, shape.eps
        )

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the last layer from the first one's input `x` [T, width] and `residual` [T, H]."""
        if self.fused is not None and isinstance(attend, PagedAttend):
            stream = residual.to(torch.float32, copy=True)
            self.fused(stream, positions, attend, first_input=x.float().contiguous())
            return stream.to(residual.dtype)
        cos_sin = self._rotary.at(positions)
        hidden = self._first(x, residual, cos_sin, attend)
        for norm, layer in zip(self._norms, self._others, strict=True):
            hidden = layer(norm(hidden), hidden, cos_sin, attend)
        return hidden


class _Layer:
    """Attention over inputs of `width` columns, then the feed-forward. The caller passes the attention's residual."""

    def __init__(self, index: int, shape: LlamaShape, loader: Loader, prefix: str, width: int) -> None:
        self.attention = Attention(index, shape, loader, prefix + "self_attn.", width)
        weight = loader.tensor(prefix + "post_attention_layernorm.weight", (shape.hidden_size,))
        self.ffn_norm = RMSNorm(weight, shape.eps)
        self.ffn = FeedForward(shape.hidden_size, shape.ffn_size, loader, prefix + "mlp.")

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed, hidden = self.ffn_norm.after_add(self.attention(x, *cos_sin, attend), residual)
        return self.ffn.added(normed, hidden)
