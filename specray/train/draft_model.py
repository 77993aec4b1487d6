"""A draft model made of some of the target's layers, with the target's embeddings and output matrix.

Training adapts the layers to the missing ones. Embeddings and output matrix are frozen, so that draft model and target
share them when they are served in one process. Parameter names are those of the checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from specray.errors import ConfigError
from specray.layers.module import Layer
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.train.attention import SequenceKV
from specray.train.heads import Norm, TrainedAttention, TrainedDecoderLayer, TrainedHead
from specray.train.target import Target
from specray.train.unroll import Batch


class TrainedDraftModel(nn.Module):
    """A language model. Training uses only the output rows of the most frequent ids (`draft_ids`)."""

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
        """Initialize with the target's weights of the kept layers."""
        loader = Loader(target.folder, "auto", torch.float32, target.device)
        try:
            for name, parameter in self.named_parameters():
                parameter.copy_(loader.tensor(self._in_target(name), tuple(parameter.shape)))
        finally:
            loader.close()
        self.target_rows = target.head[self.draft_ids]

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Yield the states after one, two, … of the sequence's own tokens, which a correct chain reads."""
        length = batch.token_ids.shape[1]
        positions = torch.arange(length, device=batch.token_ids.device)
        states = self.model(target.embed(batch.token_ids), *target.rotary.at(positions))
        for step in range(steps):
            yield states[:, (positions[batch.start :] + 1 + step).clamp(max=length - 1)]

    def outputs(self, states: Tensor) -> Tensor:
        return self.model.norm(states)

    @property
    def output_weight(self) -> Tensor:
        return self.target_rows

    def _in_target(self, name: str) -> str:
        """The name of a parameter in the target's checkpoint."""
        model, part, *rest = name.split(".")
        if part != "layers":
            return name
        return ".".join((model, part, str(self.kept[int(rest[0])]), *rest[1:]))


TrainedModel = TrainedHead | TrainedDraftModel


def kept_layers(wanted: str, num_layers: int) -> list[int]:
    """Parse --layers: a number of evenly spaced layers from the first to the last, or a list such as 0,9,29."""
    parts = wanted.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(
            f"--layers {wanted!r} is neither a number nor a list of layers; give for example 4 or 0,9,19,29"
        )
    numbers = [int(part) for part in parts]
    if len(parts) == 1:
        numbers = torch.linspace(0, num_layers - 1, numbers[0]).round().int().tolist()
    if not numbers or len(set(numbers)) < len(numbers) or sorted(numbers) != numbers or numbers[-1] >= num_layers:
        raise ConfigError(
            f"--layers {wanted} does not fit a target of {num_layers} layers; give 1 … {num_layers} as a number, or "
            f"different layers from 0 to {num_layers - 1} in ascending order"
        )
    return numbers


class _Body(Layer):
    """The layers, and the final norm, which `TrainedDraftModel.outputs` applies."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        options = (shape.qkv_bias, shape.output_bias, shape.qk_norm)
        self.layers = nn.ModuleList(
            TrainedDecoderLayer(shape, TrainedAttention(shape, shape.hidden_size, *options))
            for _ in range(shape.num_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, SequenceKV())
        return hidden
