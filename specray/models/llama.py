"""The Llama family: Llama 2/3, Mistral, SmolLM2, Qwen2 and MiMo (QKV bias), Qwen3 (QK norm)."""

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.layers.linear import ColumnParallelLinear, RowParallelLinear
from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import rotate_
from specray.models.causal_lm import CausalLM
from specray.models.llama_shape import LlamaShape, heads_of_rank
from specray.models.loading import Loader
from specray.ops.attention import Attend, FusedAttend
from specray.ops.linear import concat, is_row_wise
from specray.ops.quantised_weight import Weight


class Llama(CausalLM):
    """Decoder layers of grouped-query attention and a dense feed-forward."""

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> LlamaShape:
        return LlamaShape.of(config, group)

    @classmethod
    def attention(cls, config: PretrainedConfig, loader: Loader, prefix: str, kv_layer: int) -> Layer:
        return Attention(kv_layer, cls.shape_of(config, loader.group), loader, prefix)


class Attention(Layer):
    """Grouped-query attention of a rank's heads. The input has `width` columns, by default `hidden_size`."""

    def __init__(self, index: int, shape: LlamaShape, loader: Loader, prefix: str, width: int | None = None) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads = shape.num_local_heads, shape.num_local_kv_heads
        self.head_dim = shape.head_dim
        self.qkv = ColumnParallelLinear(*_qkv(shape, loader, prefix, width or shape.hidden_size), loader.quantization)
        whole = (shape.hidden_size, shape.num_heads * shape.head_dim)
        bias = loader.tensor(prefix + "o_proj.bias", (shape.hidden_size,)) if shape.output_bias else None
        heads, _ = heads_of_rank(shape.num_heads, shape.num_kv_heads, loader.group)
        weight = loader.weight(prefix + "o_proj.weight", whole, _rows(heads, shape.head_dim), 1)
        self.out = RowParallelLinear(weight, loader.group, bias, loader.quantization)
        self.q_norm = self.k_norm = None
        self._eps = shape.eps
        if shape.qk_norm:
            self.q_norm = RMSNorm(loader.tensor(prefix + "q_norm.weight", (shape.head_dim,)), shape.eps)
            self.k_norm = RMSNorm(loader.tensor(prefix + "k_norm.weight", (shape.head_dim,)), shape.eps)

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        return is_row_wise(self.qkv.run) and is_row_wise(self.out.run)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """This rank's part of the output, see `RowParallelLinear.part`."""
        q_heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, q_heads + 2 * kv_heads, self.head_dim)
        if isinstance(attend, FusedAttend):
            norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
            return self.out.part(attend.rotated(self.index, qkv, cos, sin, norms, self._eps))
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :q_heads] = self.q_norm(qkv[:, :q_heads])
            qkv[:, q_heads:-kv_heads] = self.k_norm(qkv[:, q_heads:-kv_heads])
        rotate_(qkv.narrow(1, 0, q_heads + kv_heads), cos, sin)
        q, kv = qkv.split_with_sizes((q_heads, 2 * kv_heads), 1)
        return self.out.part(attend(self.index, q, kv.view(-1, 2, kv_heads, self.head_dim)))


def _qkv(shape: LlamaShape, loader: Loader, prefix: str, width: int) -> tuple[Weight, Tensor | None]:
    """This rank's rows of q, k and v stacked, and their bias if the model has one."""
    weights, biases = [], []
    heads, kv_heads = heads_of_rank(shape.num_heads, shape.num_kv_heads, loader.group)
    for name, number, part_heads in (
        ("q_proj", shape.num_heads, heads),
        ("k_proj", shape.num_kv_heads, kv_heads),
        ("v_proj", shape.num_kv_heads, kv_heads),
    ):
        size, part = (number * shape.head_dim, width), _rows(part_heads, shape.head_dim)
        weights.append(loader.weight(f"{prefix}{name}.weight", size, part))
        if shape.qkv_bias:
            biases.append(loader.tensor(f"{prefix}{name}.bias", size[:1], part))
    return concat(*weights), torch.cat(biases) if biases else None


def _rows(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
