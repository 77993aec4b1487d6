"""The Llama family: Llama 2/3, Mistral, SmolLM2, Qwen2 and MiMo (qkv bias), Qwen3 (q/k norm).

One flattened batch [T, hidden] goes through; rows, trees and caches are `attend`'s business. Fused
qkv and gate-up; each rank of a RankGroup holds whole groups of heads (they need not divide evenly). Architectures that
differ in what a layer holds are subclasses in files of their own (`moe_models`, `deepseek`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from specray.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabEmbedding, VocabHead
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding, rotate_
from specray.models.loading import Loader
from specray.ops.attention import Attend

_QKV_BIAS = ("Qwen2ForCausalLM", "MiMoForCausalLM")  # in q, k and v alone, whatever attention_bias says
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


SelfAttention = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # of normed states, cos and sin; all [T, …]
Feed = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a checkpoint and of this rank's part."""

    num_layers: int
    hidden_size: int
    num_heads: int  # of the checkpoint
    num_kv_heads: int  # of the checkpoint
    head_dim: int
    ffn_size: int
    vocab_size: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    kv_heads: slice  # this rank's
    ffn: slice  # this rank's

    @classmethod
    def of(cls, config: PretrainedConfig, group: RankGroup) -> "LlamaShape":
        architecture = (config.architectures or ["LlamaForCausalLM"])[0]
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        llama_bias = bool(getattr(config, "attention_bias", False)) and architecture not in _QKV_BIAS
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            ffn_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            qkv_bias=llama_bias or architecture in _QKV_BIAS,
            output_bias=llama_bias,
            qk_norm=architecture in _QK_NORM,
            tied=bool(config.tie_word_embeddings),
            kv_heads=group.share(num_kv_heads),
            ffn=group.share(config.intermediate_size),
        )

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_local_kv_heads(self) -> int:
        return len(range(self.num_kv_heads)[self.kv_heads])

    @property
    def num_local_heads(self) -> int:
        return self.num_local_kv_heads * self.heads_per_group

    def kv_part(self) -> slice:
        """This rank's rows of k_proj and v_proj."""
        return slice(self.kv_heads.start * self.head_dim, self.kv_heads.stop * self.head_dim)

    def q_part(self) -> slice:
        """This rank's rows of q_proj, and columns of o_proj."""
        width = self.heads_per_group * self.head_dim
        return slice(self.kv_heads.start * width, self.kv_heads.stop * width)


class Llama:
    """The target. `__call__` gives final hidden states; `logits` the law of the next token."""

    def __init__(self, config: PretrainedConfig, loader: Loader, group: RankGroup, max_positions: int) -> None:
        self.shape = shape = self.shape_of(config, group)
        vocab = (shape.vocab_size, shape.hidden_size)
        self.embedding = VocabEmbedding(loader.vocab("model.embed_tokens.weight", vocab, group.rank, group.size), group)
        self.layers = [
            self.layer(config, shape, index, f"model.layers.{index}.", loader, group)
            for index in range(shape.num_layers)
        ]
        self.norm = RMSNorm(loader.tensor("model.norm.weight", (shape.hidden_size,)), shape.eps)
        tied = shape.tied or "lm_head.weight" not in loader
        head = self.embedding.weight if tied else loader.vocab("lm_head.weight", vocab, group.rank, group.size)
        self.head = VocabHead(head, shape.vocab_size, group, loader.quantization)
        self.max_positions = max_positions
        self.rotary = self.rotary_of(config, shape, max_positions, loader)

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> LlamaShape:
        return LlamaShape.of(config, group)

    @classmethod
    def rotary_of(
        cls, config: PretrainedConfig, shape: LlamaShape, max_positions: int, loader: Loader
    ) -> RotaryEmbedding:
        return RotaryEmbedding(config, shape.head_dim, max_positions, loader.dtype, loader.device)

    @classmethod
    def layer(
        cls,
        config: PretrainedConfig,
        shape: LlamaShape,
        index: int,
        prefix: str,
        loader: Loader,
        group: RankGroup,
        kv_layer: int | None = None,
    ) -> "DecoderLayer":
        """Layer `index` of this kind from tensors `prefix`*; its KV is layer `kv_layer` or `index` of the pool."""
        attention = cls.attention(config, shape, index if kv_layer is None else kv_layer, prefix, loader, group)
        feed_forward = cls.feed_forward(config, shape, index, prefix, loader, group)
        return DecoderLayer(shape, loader, prefix, attention, feed_forward)

    @classmethod
    def attention(
        cls,
        config: PretrainedConfig,  # noqa: ARG003
        shape: LlamaShape,
        kv_layer: int,
        prefix: str,
        loader: Loader,
        group: RankGroup,
    ) -> SelfAttention:
        return Attention(kv_layer, shape, loader, group, prefix + "self_attn.")

    @classmethod
    def feed_forward(
        cls,
        config: PretrainedConfig,  # noqa: ARG003
        shape: LlamaShape,
        index: int,  # noqa: ARG003
        prefix: str,
        loader: Loader,
        group: RankGroup,
    ) -> Feed:
        return FeedForward(shape, loader, group, prefix + "mlp.")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, aux_hidden_state_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """(hidden states after the final norm, features), each [T, hidden]; token_ids and positions are int64 [T].

        Aux hidden states are the residual stream as it enters a layer of `aux_hidden_state_layers`; for `num_layers`,
        one past the last, it is the hidden states after the final norm.
        """
        cos, sin = self.rotary.at(positions)
        hidden = self.embedding(token_ids)
        aux_hidden_states: dict[
            int, Tensor
        ] = {}  # only those asked for: a long prompt's states of all layers fill a memory
        for index, layer in enumerate(self.layers):
            if index in aux_hidden_state_layers:
                aux_hidden_states[index] = hidden
            hidden = layer(hidden, cos, sin, attend)
        aux_hidden_states[len(self.layers)] = final = self.norm(hidden)
        return final, [aux_hidden_states[index] for index in aux_hidden_state_layers]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab] from final hidden states [n, hidden]."""
        return self.head(hidden_states)


class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        shape: LlamaShape,
        loader: Loader,
        prefix: str,
        attention: SelfAttention,
        ffn: Feed,
    ) -> None:
        size = (shape.hidden_size,)
        self.input_norm = RMSNorm(loader.tensor(prefix + "input_layernorm.weight", size), shape.eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(loader.tensor(prefix + "post_attention_layernorm.weight", size), shape.eps)
        self.ffn = ffn

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        hidden = self.attention(self.input_norm(hidden), cos, sin, attend).add_(hidden)
        return self.ffn(self.ffn_norm(hidden)).add_(hidden)


class Attention:
    """Grouped-query attention over this rank's KV heads and their query heads; reads `width` inputs (None: hidden)."""

    def __init__(
        self, index: int, shape: LlamaShape, loader: Loader, group: RankGroup, prefix: str, width: int | None = None
    ) -> None:
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = (
            shape.num_local_heads,
            shape.num_local_kv_heads,
            shape.head_dim,
        )
        self.qkv = ColumnParallelLinear(*_qkv(shape, loader, prefix, width or shape.hidden_size), loader.quantization)
        whole = (shape.hidden_size, shape.num_heads * shape.head_dim)
        bias = loader.tensor(prefix + "o_proj.bias", (shape.hidden_size,)) if shape.output_bias else None
        weight = loader.tensor(prefix + "o_proj.weight", whole, shape.q_part(), 1).contiguous()
        self.out = RowParallelLinear(weight, group, bias, loader.quantization)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm = RMSNorm(loader.tensor(prefix + "q_norm.weight", (shape.head_dim,)), shape.eps)
            self.k_norm = RMSNorm(loader.tensor(prefix + "k_norm.weight", (shape.head_dim,)), shape.eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q_heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, q_heads + 2 * kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :q_heads] = self.q_norm(qkv[:, :q_heads])
            qkv[:, q_heads:-kv_heads] = self.k_norm(qkv[:, q_heads:-kv_heads])
        rotate_(qkv.narrow(1, 0, q_heads + kv_heads), cos, sin)
        q, kv = qkv.split_with_sizes((q_heads, 2 * kv_heads), 1)
        return self.out(attend(self.index, q, kv.view(-1, 2, kv_heads, self.head_dim)))


class FeedForward:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, shape: LlamaShape, loader: Loader, group: RankGroup, prefix: str) -> None:
        size = (shape.ffn_size, shape.hidden_size)
        gate = loader.tensor(prefix + "gate_proj.weight", size, shape.ffn)
        up = loader.tensor(prefix + "up_proj.weight", size, shape.ffn)
        self.gate_up = ColumnParallelLinear(torch.cat((gate, up)), quantization=loader.quantization)
        down = loader.tensor(prefix + "down_proj.weight", size[::-1], shape.ffn, 1).contiguous()
        self.down = RowParallelLinear(down, group, quantization=loader.quantization)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def _qkv(shape: LlamaShape, loader: Loader, prefix: str, width: int) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of q, k and v stacked, and their bias if the family has one."""
    weights, biases = [], []
    for name, heads, part in (
        ("q_proj", shape.num_heads, shape.q_part()),
        ("k_proj", shape.num_kv_heads, shape.kv_part()),
        ("v_proj", shape.num_kv_heads, shape.kv_part()),
    ):
        size = (heads * shape.head_dim, width)
        weights.append(loader.tensor(f"{prefix}{name}.weight", size, part))
        if shape.qkv_bias:
            biases.append(loader.tensor(f"{prefix}{name}.bias", size[:1], part))
    return torch.cat(weights), torch.cat(biases) if biases else None
