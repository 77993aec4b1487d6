"""The draft heads as they are trained; parameter names are those of the checkpoints, so saving is `state_dict`.

What lives here: the modules of EAGLE-3, EAGLE-2 and MiMo's MTP layer, and how they start. Not here: running them in the
engine (`specray.models`), the unrolled steps (`unroll`), config.json (`export`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.models.llama import LlamaShape
from specray.train.attention import ChainMemory
from specray.train.norm import rms_norm
from specray.train.target import Target
from specray.train.unroll import Batch, hidden_state_rollout

_SPREAD = 0.02  # standard deviation of matrices that start at random
_QUIET = 0.002  # of those that write into the residual stream, so that the start is what the identity gives


class Eagle3Head(nn.Module):
    """Three target features and the next token in; one layer with queries, keys and values of [embedding; state]."""

    draft_ids: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, num_aux_hidden_states: int = 3) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.fc = linear(num_aux_hidden_states * size, size)
        self.fc_norm = nn.ModuleList(Norm(size, shape.eps) for _ in range(num_aux_hidden_states))
        self.midlayer = Eagle3Layer(shape)
        self.norm = Norm(size, shape.eps)
        self.lm_head = linear(size, len(draft_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True))

    def start_from(self, target: Target) -> None:
        """Begin as: the state is the highest feature, and the output is the target's."""
        _begin_as_last_block(self.fc.weight)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[self.draft_ids])
            self.norm.weight.copy_(target.norm)

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        states: Tensor = self.fc(self.normed_hidden_states(aux_hidden_states))
        return states

    def normed_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """What fc reads: every feature with a norm of its own."""
        chunks = aux_hidden_states.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        stepped: Tensor = self.midlayer(embeds, states, cos, sin, memory)
        return stepped

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        return hidden_state_rollout(self, target, batch, steps)

    def outputs(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight


class _FrozenOutputHead(nn.Module, ABC):
    """A head that states the target's final state and leaves the token to the target's own output matrix.

    Training looks at the most frequent ids only (`draft_ids`): the matrix is frozen, so nothing depends on the others.
    """

    draft_ids: Tensor
    target_rows: Tensor

    def __init__(self, shape: LlamaShape, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        rows = torch.zeros(len(draft_ids), shape.hidden_size)
        self.register_buffer("target_rows", rows, persistent=False)

    @abstractmethod
    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor: ...

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


class Eagle2Head(_FrozenOutputHead):
    """The target's final hidden state and the next token in; a Llama layer without its first norm."""

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, bias: bool = False) -> None:
        super().__init__(shape, draft_ids)
        self.fc = linear(2 * shape.hidden_size, shape.hidden_size, bias)
        self.layers = nn.ModuleList([Eagle2Layer(shape)])

    def start_from(self, target: Target) -> None:
        """Begin as: the layer is fed the feature."""
        _begin_as_last_block(self.fc.weight)
        self.take_output_of(target)

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        stepped: Tensor = self.layers[0](self.fc(torch.cat((embeds, states), -1)), cos, sin, memory)
        return stepped


class MtpHead(_FrozenOutputHead):
    """MiMo's MTP layer: the target's final state and the next token in, each normed; the target's head."""

    def __init__(self, shape: LlamaShape, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        size = shape.hidden_size
        self.token_layernorm = Norm(size, shape.eps)
        self.hidden_layernorm = Norm(size, shape.eps)
        self.input_proj = linear(2 * size, size)
        self.input_layernorm = Norm(size, shape.eps)
        self.self_attn = Attention(shape, size, qkv_bias=True)
        self.post_attention_layernorm = Norm(size, shape.eps)
        self.mlp = FeedForward(shape)
        self.final_layernorm = Norm(size, shape.eps)

    def start_from(self, target: Target) -> None:
        """Begin as: the state passes through, for the first norm takes away what the last one gives it."""
        norm, size = target.norm.float(), self.shape.hidden_size
        with torch.no_grad():
            self.input_proj.weight.mul_(_QUIET / _SPREAD)
            self.input_proj.weight[:, :size].copy_(torch.eye(size))
            self.hidden_layernorm.weight.copy_(norm.square().mean().sqrt() / norm)
            self.final_layernorm.weight.copy_(norm)
        self.take_output_of(target)

    @property
    def fc(self) -> nn.Linear:
        """What makes one vector of the two inputs, as in other heads."""
        return self.input_proj

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        x = self.input_proj(self.joined(embeds, states, masks_first=memory.is_empty))
        residual = memory.rows_with_queries(x)
        x = residual + self.self_attn(self.input_layernorm(x), cos, sin, memory)
        stepped: Tensor = self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))
        return stepped

    def joined(self, embeds: Tensor, states: Tensor, masks_first: bool) -> Tensor:
        """[B, n, 2 * H]: state, then embedding; at the sequence's first position there is none."""
        if masks_first:
            embeds = torch.cat((torch.zeros_like(embeds[:, :1]), embeds[:, 1:]), 1)
        return torch.cat((self.hidden_layernorm(states), self.token_layernorm(embeds)), -1)


class Eagle3Layer(nn.Module):
    """The residual is the state as it came, un-normed."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.input_layernorm = Norm(size, shape.eps)
        self.hidden_norm = Norm(size, shape.eps)
        self.self_attn = Attention(shape, 2 * size)
        self.post_attention_layernorm = Norm(size, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), -1)
        residual = memory.rows_with_queries(states)
        states = residual + self.self_attn(x, cos, sin, memory)
        fed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return fed


class Eagle2Layer(nn.Module):
    """Attention reads the states as they are."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        residual = memory.rows_with_queries(states)
        states = residual + self.self_attn(states, cos, sin, memory)
        fed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return fed


class Attention(nn.Module):
    """Grouped-query attention over a ChainMemory."""

    def __init__(self, shape: LlamaShape, in_size: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = linear(in_size, shape.num_heads * shape.head_dim, qkv_bias)
        self.k_proj = linear(in_size, shape.num_kv_heads * shape.head_dim, qkv_bias)
        self.v_proj = linear(in_size, shape.num_kv_heads * shape.head_dim, qkv_bias)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size, spread=_QUIET)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        """x [B, L or chains, in_size]; cos and sin [L or chains, 1, dim] are of x's positions."""
        heads = (*x.shape[:2], -1, self.head_dim)
        k = rotated(self.k_proj(x).view(heads), cos, sin)
        v = self.v_proj(x).view(heads)
        asking = memory.rows_with_queries(x)
        skipped = x.shape[1] - asking.shape[1]
        q = self.q_proj(asking).view(*asking.shape[:2], -1, self.head_dim)
        out: Tensor = self.o_proj(memory.attend(rotated(q, cos[skipped:], sin[skipped:]), k, v))
        return out


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.ffn_size)
        self.up_proj = linear(shape.hidden_size, shape.ffn_size)
        self.down_proj = linear(shape.ffn_size, shape.hidden_size, spread=_QUIET)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


TrainedHead = Eagle3Head | Eagle2Head | MtpHead


def linear(in_size: int, out_size: int, bias: bool = False, spread: float = _SPREAD) -> nn.Linear:
    made = nn.Linear(in_size, out_size, bias)
    nn.init.normal_(made.weight, std=spread)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def _begin_as_last_block(weight: Tensor) -> None:
    """Let [H, n * H] pass its last block through, and next to nothing of the others."""
    size = weight.shape[0]
    with torch.no_grad():
        weight.mul_(_QUIET / _SPREAD)
        weight[:, -size:].copy_(torch.eye(size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, n, heads, dim] turned to its positions; rolling by half swaps the pairs, and the sign is in `sin`."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
