"""A draft model cut out of the target: some of its layers, between its own embeddings and output matrix.

The layers learn to do without those that were left out; embeddings and output matrix stay the target's, so that the two
share them when they serve in one process. Parameter names are those of the checkpoint. Not here: batches and the loop
(`trainer`), the files of an ordinary model folder (`draft_export`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.errors import ConfigError
from specray.models.llama import LlamaShape
from specray.models.loading import Loader
from specray.train.heads import FeedForward, Norm, TrainedHead, linear, rotated
from specray.train.target import Target
from specray.train.unroll import Batch


class DraftModel(nn.Module):
    """A language model. Training looks at the most frequent ids only (`draft_ids`), as the output matrix is frozen."""

    draft_ids: Tensor
    target_rows: Tensor

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, kept: Sequence[int]) -> None:
        super().__init__()
        self.shape = replace(shape, num_layers=len(kept))
        self.kept = list(kept)  # which of the target's layers
        self.model = _Body(self.shape)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        rows = torch.zeros(len(draft_ids), shape.hidden_size)
        self.register_buffer("target_rows", rows, persistent=False)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Begin as the target with layers left out."""
        loader = Loader(target.folder, "auto", torch.float32, target.device)
        try:
            for name, parameter in self.named_parameters():
                parameter.copy_(loader.tensor(self._in_target(name), tuple(parameter.shape)))
        finally:
            loader.close()
        self.target_rows = target.head[self.draft_ids]

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The states after one, two, … of the sequence's own tokens: what a chain reads as long as it is right."""
        length = batch.token_ids.shape[1]
        positions = torch.arange(length, device=batch.token_ids.device)
        states = self.model(target.embed(batch.token_ids), *target.rotary.at(positions))
        for step in range(steps):
            yield states[:, (positions[batch.start :] + 1 + step).clamp(max=length - 1)]

    def outputs(self, states: Tensor) -> Tensor:
        normed: Tensor = self.model.norm(states)
        return normed

    @property
    def output_weight(self) -> Tensor:
        return self.target_rows

    def _in_target(self, name: str) -> str:
        """The target's name of a parameter."""
        model, part, *rest = name.split(".")
        if part != "layers":
            return name
        return ".".join((model, part, str(self.kept[int(rest[0])]), *rest[1:]))


TrainedModel = TrainedHead | DraftModel


def kept_layers(wanted: str, num_layers: int) -> list[int]:
    """`wanted` is a number of layers, spaced evenly from the first to the last, or a list of layers such as 0,9,29."""
    parts = wanted.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--layers {wanted!r} is neither a number nor a list of layers; give such as 4 or 0,9,19,29")
    numbers = [int(part) for part in parts]
    if len(parts) == 1:
        numbers = torch.linspace(0, num_layers - 1, numbers[0]).round().int().tolist()
    if not numbers or len(set(numbers)) < len(numbers) or sorted(numbers) != numbers or numbers[-1] >= num_layers:
        raise ConfigError(
            f"--layers {wanted} does not fit a target of {num_layers} layers; give 1 … {num_layers} as a number, or "
            f"different layers from 0 to {num_layers - 1} in ascending order"
        )
    return numbers


class _Body(nn.Module):
    """The layers and the norm behind them, which `outputs` applies."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return hidden


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        fed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return fed


class _Attention(nn.Module):
    """Causal grouped-query attention over whole sequences; padding at their ends is seen by padding alone."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size, self.head_dim, self.fold = shape.hidden_size, shape.head_dim, shape.heads_per_group
        self.q_proj = linear(size, shape.num_heads * shape.head_dim, shape.qkv_bias)
        self.k_proj = linear(size, shape.num_kv_heads * shape.head_dim, shape.qkv_bias)
        self.v_proj = linear(size, shape.num_kv_heads * shape.head_dim, shape.qkv_bias)
        self.o_proj = linear(shape.num_heads * shape.head_dim, size, shape.output_bias)
        self.q_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotated(q, cos, sin).transpose(1, 2)
        k, v = (t.transpose(1, 2).repeat_interleave(self.fold, 1) for t in (rotated(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out
