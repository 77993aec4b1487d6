"""The decoder layers of draft heads, and the parts that their networks are made of.

A network (`Eagle2`, `Eagle3`, `MtpLayer`) names its tensors and joins its parts, once for serving and for training.
`Parts` makes them: `ServedParts` packs weights, `specray.train.trained_parts` makes parameters with gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specray.layers.rotary import RotaryEmbedding
from specray.models.fused import fused
from specray.models.target_model import ModelShape
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.cpu.layers import FusedLayers

Linear = Callable[[Tensor], Tensor]
Embedding = Callable[[Tensor], Tensor]  # [..., size] of ids of any shape
# kv [layers, ..., T, 2, kv_heads, dim] of states [..., T, H] at positions int64 [T]
ContextKV = Callable[[Tensor, Tensor], Tensor]
AttentionPart = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # of (x, cos, signed sin, attend)


class Norm(Protocol):
    """A root-mean-square norm over the last dimension."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum); a trained one adds the last rows of `residual` if x has fewer."""


class FeedForwardPart(Protocol):
    """A gated feed-forward."""

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """Its output for x, plus `residual`."""


class Layers(Protocol):
    """The decoder layers of a head."""

    fused: FusedLayers | None  # the same layers as one call of the CPU kernels

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the last layer from the input `x` [T, width] and the residual stream [T, H]."""


class Parts(ABC):
    """Makes parts from tensors by name. `shape` has the sizes of the decoder layers."""

    def __init__(self, shape: ModelShape, rotary: RotaryEmbedding) -> None:
        self.shape = shape
        self.rotary = rotary

    @abstractmethod
    def norm(self, name: str, size: int) -> Norm: ...

    @abstractmethod
    def linear(self, name: str, shape: tuple[int, int], bias: str | None = None) -> Linear:
        """`shape` is [out, in]; `bias` is the name of a tensor [out]."""

    @abstractmethod
    def embedding(self, name: str, shape: tuple[int, int]) -> Embedding:
        """`shape` is [ids, size]."""

    @abstractmethod
    def context_kv(self, prefixes: Sequence[str]) -> ContextKV:
        """Keys, normed and rotated, and values of all layers of the attention `prefixes`, from one state a position."""

    @abstractmethod
    def attention(self, index: int, prefix: str, width: int) -> AttentionPart:
        """Attention of layer `index` over inputs of `width` columns."""

    @abstractmethod
    def feed_forward(self, prefix: str) -> FeedForwardPart: ...

    def norm_of_parts(self, names: Sequence[str], size: int) -> Callable[[Tensor], Tensor]:
        """The norm of x [..., n * size]: each of its n parts with the weight of one of the `names`."""
        norms = [self.norm(name, size) for name in names]
        return lambda x: torch.cat([norm(part) for norm, part in zip(norms, x.chunk(len(norms), -1), strict=True)], -1)

    def layers(self, prefixes: Sequence[str], width: int, norms_input: bool = False) -> Layers:
        """Decoder layers, of which the first reads `width` columns, after an input norm if `norms_input`."""
        return HeadLayers(self, prefixes, width, norms_input)


class HeadLayers:
    """Decoder layers of grouped-query attention and a feed-forward. Implements `Layers`."""

    def __init__(self, parts: Parts, prefixes: Sequence[str], width: int, norms_input: bool) -> None:
        first, *others = prefixes
        size = parts.shape.hidden_size
        self.first = HeadLayer(parts, 0, first, width, norms_input)
        self._others = [HeadLayer(parts, index, prefix, size, True) for index, prefix in enumerate(others, 1)]
        self._rotary = parts.rotary
        self.fused = fused(
            [(layer.input_norm, layer.attention, layer.ffn_norm, layer.ffn) for layer in (self.first, *self._others)],
            parts.rotary,
            parts.shape.eps,
        )

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self.fused is not None and isinstance(attend, PagedAttend):
            stream = residual.to(torch.float32, copy=True)
            first_input = x.float().contiguous() if self.first.input_norm is None else None
            self.fused(stream, positions, attend, first_input=first_input)
            return stream.to(residual.dtype)
        cos_sin = self._rotary.at(positions)
        hidden = self.first(x, residual, cos_sin, attend)
        for layer in self._others:
            hidden = layer(hidden, hidden, cos_sin, attend)
        return hidden


class HeadLayer:
    """A decoder layer whose residual stream need not be its input."""

    def __init__(self, parts: Parts, index: int, prefix: str, width: int, norms_input: bool) -> None:
        size = parts.shape.hidden_size
        self.input_norm = parts.norm(prefix + "input_layernorm.weight", width) if norms_input else None
        self.attention = parts.attention(index, prefix + "self_attn.", width)
        self.ffn_norm = parts.norm(prefix + "post_attention_layernorm.weight", size)
        self.ffn = parts.feed_forward(prefix + "mlp.")

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x if self.input_norm is None else self.input_norm(x)
        normed, hidden = self.ffn_norm.after_add(self.attention(x, *cos_sin, attend), residual)
        return self.ffn.added(normed, hidden)
