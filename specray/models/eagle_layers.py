"""The decoder layers of an EAGLE head."""

from torch import Tensor

from specray.layers.norm import RMSNorm
from specray.models.causal_lm import FeedForward
from specray.models.eagle_files import TensorNames
from specray.models.llama import Attention
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.ops.attention import Attend


class EagleLayers:
    """The head's layers: a first one that reads `width` columns, and in some heads ordinary decoder layers after it."""

    def __init__(self, shape: LlamaShape, loader: Loader, names: TensorNames, width: int) -> None:
        first, *others = names.layers(shape.num_layers)
        size = shape.hidden_size
        self._first = _Layer(0, shape, loader, first, width)
        self._norms = [RMSNorm(loader.tensor(other + "input_layernorm.weight", (size,)), shape.eps) for other in others]
        self._others = [_Layer(index, shape, loader, other, size) for index, other in enumerate(others, 1)]

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = self._first(x, residual, cos_sin, attend)
        for norm, layer in zip(self._norms, self._others, strict=True):
            hidden = layer(norm(hidden), hidden, cos_sin, attend)
        return hidden


class _Layer:
    """Attention over inputs of `width` columns, then the feed-forward. The caller passes the attention's residual."""

    def __init__(self, index: int, shape: LlamaShape, loader: Loader, prefix: str, width: int) -> None:
        self._attention = Attention(index, shape, loader, prefix + "self_attn.", width)
        weight = loader.tensor(prefix + "post_attention_layernorm.weight", (shape.hidden_size,))
        self._ffn_norm = RMSNorm(weight, shape.eps)
        self._ffn = FeedForward(shape.hidden_size, shape.ffn_size, loader, prefix + "mlp.")

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = self._attention(x, *cos_sin, attend).add_(residual)
        return self._ffn(self._ffn_norm(hidden)).add_(hidden)
