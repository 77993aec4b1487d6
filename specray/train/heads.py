"""Trainable EAGLE-3, P-EAGLE and EAGLE-2 heads and MiMo's MTP layer, and their initialization.

Parameter names are those of the checkpoints, so that `state_dict` is what is saved. `specray.models` has the inference
modules of the same heads: with fused and packed weights, in-place operations and paged attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.models.llama_shape import LlamaShape
from specray.train.attention import ChainKV, TrainingKV, chain_kvs
from specray.train.norm import rms_norm
from specray.train.target import Target
from specray.train.unroll import Batch, hidden_state_rollout, shifted

_STD = 0.02  # standard deviation of randomly initialized matrices
_SMALL_STD = 0.002  # of matrices that write into the residual stream, so that a layer starts as the identity


class TrainedEagle3Head(nn.Module):
    """Input: three aux hidden states and the next token.

    The attention of the first of its `shape.num_layers` layers reads [embedding; state]; the others are ordinary
    decoder layers.
    """

    draft_ids: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, num_aux_hidden_states: int = 3) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.fc = linear(num_aux_hidden_states * size, size)
        self.fc_norm = nn.ModuleList(Norm(size, shape.eps) for _ in range(num_aux_hidden_states))
        if shape.num_layers == 1:
            self.midlayer = Eagle3Layer(shape)  # SafeAILab's name, which every engine reads
        else:
            others = (TrainedDecoderLayer(shape, TrainedAttention(shape, size)) for _ in range(1, shape.num_layers))
            self.layers = nn.ModuleList([Eagle3Layer(shape), *others])
        self.norm = Norm(size, shape.eps)
        self.lm_head = linear(size, len(draft_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True))

    def start_from(self, target: Target) -> None:
        """Initialize so that the state is the last aux hidden state and the output matrix is the target's."""
        _start_as_last_block(self.fc.weight)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[self.draft_ids])
            self.norm.weight.copy_(target.norm)

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        states: Tensor = self.fc(self.normed_hidden_states(aux_hidden_states))
        return states

    def normed_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """The input of fc: each aux hidden state after its own norm."""
        chunks = aux_hidden_states.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, kvs: Sequence[ChainKV]) -> Tensor:
        first, *others = [self.midlayer] if self.shape.num_layers == 1 else self.layers
        states = first(embeds, states, cos, sin, kvs[0])
        for layer, kv in zip(others, kvs[1:], strict=True):
            states = layer(states, cos, sin, kv)
        return states

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        return hidden_state_rollout(self, target, batch, steps)

    def outputs(self, states: Tensor) -> Tensor:
        return self.norm(states)

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight


class TrainedParallelHead(TrainedEagle3Head):
    """P-EAGLE: after step 0, a mask stands for the token and the state, so that no step waits for the one before it.

    The mask is the embedding of `mask_token_id` and a learned value of the aux hidden states.
    """

    def __init__(
        self, shape: LlamaShape, draft_ids: Tensor, mask_token_id: int, num_aux_hidden_states: int = 3
    ) -> None:
        super().__init__(shape, draft_ids, num_aux_hidden_states)
        self.mask_token_id = mask_token_id
        self.mask_hidden = nn.Parameter(torch.randn(1, num_aux_hidden_states * shape.hidden_size))

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        kvs, device = chain_kvs(batch.start, self.shape.num_layers), batch.token_ids.device
        states = self.enter(batch.aux_hidden_states)
        num_rows, length = batch.token_ids.shape
        embeds = target.embed(shifted(batch.token_ids, torch.arange(1, length + 1, device=device)))
        yield self.step(embeds, states, *target.rotary.at(torch.arange(length, device=device)), kvs)
        chains = torch.arange(batch.start, length, device=device)
        token = torch.tensor([self.mask_token_id], device=device)
        embed, state = target.embed(token), self.enter(self.mask_hidden.to(states.dtype))
        embeds, states = (mask.expand(num_rows, len(chains), -1) for mask in (embed, state))
        for step in range(1, steps):
            yield self.step(embeds, states, *target.rotary.at(chains + step), kvs)


class _FrozenOutputHead(nn.Module, ABC):
    """A head that predicts the target's final hidden state and uses the target's frozen output matrix.

    Training uses only the matrix's rows of the most frequent ids (`draft_ids`).
    """

    draft_ids: Tensor
    target_rows: Tensor

    def __init__(self, shape: LlamaShape, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape = replace(shape, num_layers=1)  # however many the target has
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        rows = torch.zeros(len(draft_ids), shape.hidden_size)
        self.register_buffer("target_rows", rows, persistent=False)

    @abstractmethod
    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, kvs: Sequence[ChainKV]) -> Tensor: ...

    def take_output_of(self, target: Target) -> None:
        self.target_rows = target.head[self.draft_ids]

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        return hidden_state_rollout(self, target, batch, steps)

    def outputs(self, states: Tensor) -> Tensor:
        return states

    @property
    def output_weight(self) -> Tensor:
        return self.target_rows


class TrainedEagle2Head(_FrozenOutputHead):
    """Input: the target's final hidden state and the next token. A Llama layer without its input norm."""

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, bias: bool = False) -> None:
        super().__init__(shape, draft_ids)
        self.fc = linear(2 * shape.hidden_size, shape.hidden_size, bias)
        self.layers = nn.ModuleList(
            [TrainedDecoderLayer(shape, TrainedAttention(shape, shape.hidden_size), input_norm=False)]
        )

    def start_from(self, target: Target) -> None:
        """Initialize so that the layer's input is the hidden state."""
        _start_as_last_block(self.fc.weight)
        self.take_output_of(target)

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, kvs: Sequence[ChainKV]) -> Tensor:
        stepped: Tensor = self.layers[0](self.fc(torch.cat((embeds, states), -1)), cos, sin, *kvs)
        return stepped


class TrainedMtpHead(_FrozenOutputHead):
    """MiMo's MTP layer. Input: the target's final hidden state and the next token, each normed."""

    def __init__(self, shape: LlamaShape, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        size = shape.hidden_size
        self.token_layernorm = Norm(size, shape.eps)
        self.hidden_layernorm = Norm(size, shape.eps)
        self.input_proj = linear(2 * size, size)
        self.input_layernorm = Norm(size, shape.eps)
        self.self_attn = TrainedAttention(shape, size, qkv_bias=True)
        self.post_attention_layernorm = Norm(size, shape.eps)
        self.mlp = TrainedFeedForward(shape)
        self.final_layernorm = Norm(size, shape.eps)

    def start_from(self, target: Target) -> None:
        """Initialize so that the state passes through: the first norm's weight is the inverse of the last one's."""
        norm, size = target.norm.float(), self.shape.hidden_size
        with torch.no_grad():
            self.input_proj.weight.mul_(_SMALL_STD / _STD)
            self.input_proj.weight[:, :size].copy_(torch.eye(size))
            self.hidden_layernorm.weight.copy_(norm.square().mean().sqrt() / norm)
            self.final_layernorm.weight.copy_(norm)
        self.take_output_of(target)

    @property
    def fc(self) -> nn.Linear:
        """The projection of the two inputs, under the name that other heads give it."""
        return self.input_proj

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, kvs: Sequence[ChainKV]) -> Tensor:
        (kv,) = kvs
        x = self.input_proj(self.joined(embeds, states, masks_first=kv.is_empty))
        x = kv.rows_with_queries(x) + self.self_attn(self.input_layernorm(x), cos, sin, kv)
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))

    def joined(self, embeds: Tensor, states: Tensor, masks_first: bool) -> Tensor:
        """[B, n, 2 * H]: state, then embedding, which is zero at the sequence's first position."""
        if masks_first:
            embeds = torch.cat((torch.zeros_like(embeds[:, :1]), embeds[:, 1:]), 1)
        return torch.cat((self.hidden_layernorm(states), self.token_layernorm(embeds)), -1)


class Eagle3Layer(Layer):
    """EAGLE-3's decoder layer. The residual is the state before its norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.input_layernorm = Norm(size, shape.eps)
        self.hidden_norm = Norm(size, shape.eps)
        self.self_attn = TrainedAttention(shape, 2 * size)
        self.post_attention_layernorm = Norm(size, shape.eps)
        self.mlp = TrainedFeedForward(shape)

    def forward(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, kv: ChainKV) -> Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), -1)
        states = kv.rows_with_queries(states) + self.self_attn(x, cos, sin, kv)
        return states + self.mlp(self.post_attention_layernorm(states))


class TrainedDecoderLayer(Layer):
    """A Llama layer, or EAGLE-2's, which has no input norm."""

    def __init__(self, shape: LlamaShape, attention: "TrainedAttention", input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps) if input_norm else nn.Identity()
        self.self_attn = attention
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = TrainedFeedForward(shape)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor, kv: TrainingKV) -> Tensor:
        states = kv.rows_with_queries(states) + self.self_attn(self.input_layernorm(states), cos, sin, kv)
        return states + self.mlp(self.post_attention_layernorm(states))


class TrainedAttention(Layer):
    """Grouped-query attention over a TrainingKV."""

    def __init__(
        self,
        shape: LlamaShape,
        in_size: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = linear(in_size, shape.num_heads * shape.head_dim, qkv_bias)
        self.k_proj = linear(in_size, shape.num_kv_heads * shape.head_dim, qkv_bias)
        self.v_proj = linear(in_size, shape.num_kv_heads * shape.head_dim, qkv_bias)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size, output_bias, std=_SMALL_STD)
        self.q_norm = Norm(shape.head_dim, shape.eps) if qk_norm else nn.Identity()
        self.k_norm = Norm(shape.head_dim, shape.eps) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: TrainingKV) -> Tensor:
        """x is [B, n, in_size]; cos and sin [n, 1, dim] are those of its positions."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        rows = kv.rows_with_queries(x)
        skipped = x.shape[1] - rows.shape[1]
        q = self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim)))
        q, k = rotated(q, cos[skipped:], sin[skipped:]), rotated(self.k_norm(k), cos, sin)
        out: Tensor = self.o_proj(kv.attend(q, k, v))
        return out


class TrainedFeedForward(Layer):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.ffn_size)
        self.up_proj = linear(shape.hidden_size, shape.ffn_size)
        self.down_proj = linear(shape.ffn_size, shape.hidden_size, std=_SMALL_STD)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(Layer):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


TrainedHead = TrainedEagle3Head | TrainedEagle2Head | TrainedMtpHead


def linear(in_size: int, out_size: int, bias: bool = False, std: float = _STD) -> nn.Linear:
    made = nn.Linear(in_size, out_size, bias)
    nn.init.normal_(made.weight, std=std)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def _start_as_last_block(weight: Tensor) -> None:
    """Make the last block of weight [H, n * H] the identity and the others small."""
    size = weight.shape[0]
    with torch.no_grad():
        weight.mul_(_SMALL_STD / _STD)
        weight[:, -size:].copy_(torch.eye(size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, n, heads, dim], out of place (see `specray.layers.rotary.rotate_`)."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
