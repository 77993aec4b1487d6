"""The parts of networks, with parameters and gradients: linears, norms, attention, feed-forward.

Parameters have the names of the checkpoints' tensors, so that `state_dict` is what is saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.layers.rotary import RotaryEmbedding
from specray.models.heads.parts import ContextKV, Parts
from specray.models.llama_shape import LlamaShape
from specray.ops.attention import Attend
from specray.train.attention import ChainAttention

STD = 0.02  # standard deviation of randomly initialized matrices
SMALL_STD = 0.002  # of matrices that write into the residual stream, so that a layer starts as the identity


class TrainedParts(Parts):
    """Parts that are submodules of `root`, by the names of their tensors."""

    def __init__(self, root: nn.Module, shape: LlamaShape, rotary: RotaryEmbedding) -> None:
        super().__init__(shape, rotary)
        self._root = root
        self._shape = shape

    def norm(self, name: str, size: int) -> "TrainedNorm":
        made = TrainedNorm(size, self.shape.eps)
        self._add(name.removesuffix(".weight"), made)
        return made

    def linear(self, name: str, shape: tuple[int, int], bias: str | None = None) -> nn.Linear:
        made = linear(shape[1], shape[0], bias is not None)
        self._add(name.removesuffix(".weight"), made)
        return made

    def embedding(self, name: str, shape: tuple[int, int]) -> nn.Embedding:
        made = nn.Embedding(*shape)
        nn.init.normal_(made.weight, std=STD)
        self._add(name.removesuffix(".weight"), made)
        return made

    def context_kv(self, prefixes: Sequence[str]) -> ContextKV:
        """Of layers that were made before."""
        layers = [self._root.get_submodule(prefix.removesuffix(".")) for prefix in prefixes]

        def context_kv(states: Tensor, positions: Tensor) -> Tensor:
            angles = self.rotary.at(positions)
            return torch.stack([layer.kv(states, *angles) for layer in layers if isinstance(layer, TrainedAttention)])

        return context_kv

    def attention(self, index: int, prefix: str, width: int) -> "TrainedAttention":
        made = TrainedAttention(index, self._shape, width)
        self._add(prefix.removesuffix("."), made)
        return made

    def feed_forward(self, prefix: str) -> "TrainedFeedForward":
        made = TrainedFeedForward(self._shape)
        self._add(prefix.removesuffix("."), made)
        return made

    def _add(self, name: str, module: nn.Module) -> None:
        *parents, last = name.split(".")
        owner = self._root
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(last, module)


class TrainedAttention(Layer):
    """Grouped-query attention of layer `index` over inputs of `width` columns."""

    def __init__(self, index: int, shape: LlamaShape, width: int) -> None:
        super().__init__()
        self._index = index
        self.head_dim = shape.head_dim
        self.q_proj = linear(width, shape.num_heads * shape.head_dim, shape.qkv_bias)
        self.k_proj = linear(width, shape.num_kv_heads * shape.head_dim, shape.qkv_bias)
        self.v_proj = linear(width, shape.num_kv_heads * shape.head_dim, shape.qkv_bias)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size, shape.output_bias, std=SMALL_STD)
        self.q_norm = TrainedNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()
        self.k_norm = TrainedNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, queries, hidden] from x [B, n, width]; cos and sin [n, 1, dim] are those of its positions."""
        rows = attend.rows_with_queries(self._index, x) if isinstance(attend, ChainAttention) else x
        skipped = x.shape[1] - rows.shape[1]
        q = self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim)))
        q = rotated(q, cos[skipped:], sin[skipped:])
        out: Tensor = self.o_proj(attend(self._index, q, self.kv(x, cos, sin)))
        return out

    def kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys and values [B, n, 2, kv_heads, dim] of x [B, n, width]."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return torch.stack((rotated(self.k_norm(k), cos, sin), v), 2)


class TrainedFeedForward(Layer):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.ffn_size)
        self.up_proj = linear(shape.hidden_size, shape.ffn_size)
        self.down_proj = linear(shape.ffn_size, shape.hidden_size, std=SMALL_STD)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


class TrainedNorm(Layer):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm`: `x` has no row where `ChainAttention` has no query."""
        summed = residual[:, -x.shape[1] :] + x
        return self(summed), summed


def linear(in_size: int, out_size: int, bias: bool = False, std: float = STD) -> nn.Linear:
    made = nn.Linear(in_size, out_size, bias)
    nn.init.normal_(made.weight, std=std)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, n, heads, dim], out of place (see `specray.layers.rotary.rotate_`)."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, in x's type.

    Its backward takes few passes; torch's own runs ten operations on a CPU.
    """
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad = grad.float()
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        inner = grad * weight
        inner = inner.sub_(normed.mul_((inner * normed).mean(-1, keepdim=True))).mul_(scale)
        return inner.to(x.dtype), weight_grad, None
