"""A draft model made of some of the target's layers, with the target's embeddings and output matrix.

Training adapts the layers to the missing ones. Embeddings and output matrix are frozen, so that draft model and target
share them when they are served in one process. Parameter names are those of the checkpoint.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.models.heads.parts import Parts
from specray.models.loading import EMBEDDING, HEAD, Loader
from specray.train.attention import attend_to_sequences
from specray.train.target import Target
from specray.train.trained_parts import TrainedParts
from specray.train.unroll import Batch, TrainedModel

_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


class TrainedDraftModel(TrainedModel):
    """A language model. Training uses only the output rows of the most frequent ids (`draft_ids`)."""

    def __init__(self, target: Target, draft_ids: Tensor, kept: Sequence[int]) -> None:
        super().__init__(draft_ids)
        self.shape = shape = replace(target.shape, num_layers=len(kept))
        self.kept = list(kept)  # which of the target's layers
        self._network = _Network(TrainedParts(self, shape, target.rotary))

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Initialize with the target's weights of the kept layers."""
        loader = Loader(target.folder, "auto", torch.float32, target.device)
        try:
            for name, parameter in self.named_parameters():
                parameter.copy_(loader.tensor(self._in_target(name), tuple(parameter.shape)))
        finally:
            loader.close()
        self.take_output_of(target)

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Yield the states after one, two, … of the sequence's own tokens, which a correct chain reads."""
        length = batch.token_ids.shape[1]
        positions = torch.arange(length, device=batch.token_ids.device)
        embeds = target.embed(batch.token_ids)
        states = self._network.layers(embeds, embeds, positions, attend_to_sequences)
        for step in range(steps):
            yield states[:, (positions[batch.start :] + 1 + step).clamp(max=length - 1)]

    def outputs(self, states: Tensor) -> Tensor:
        return self._network.norm(states)

    def tensors(self, target: Target) -> dict[str, Tensor]:
        """Those of the exported model: trained ones, and the target's embeddings and output matrix."""
        shared = {EMBEDDING: target.embedding}
        if not target.shape.tied:
            shared[HEAD] = target.head
        return self.state_dict() | shared

    def config(self, target: Target) -> dict[str, Any]:
        """The target's config.json with the kept layers only."""
        config: dict[str, Any] = json.loads((target.folder / "config.json").read_text(encoding="utf-8"))
        by_layer = {name: config[name] for name in ("layer_types",) if config.get(name)}
        chosen = {name: [values[layer] for layer in self.kept] for name, values in by_layer.items()}
        return config | {"num_hidden_layers": len(self.kept), "torch_dtype": "bfloat16", "dtype": "bfloat16"} | chosen

    def _in_target(self, name: str) -> str:
        """The name of a parameter in the target's checkpoint."""
        model, part, *rest = name.split(".")
        if part != "layers":
            return name
        return ".".join((model, part, str(self.kept[int(rest[0])]), *rest[1:]))


class _Network:
    def __init__(self, parts: Parts) -> None:
        prefixes = [f"model.layers.{layer}." for layer in range(parts.shape.num_layers)]
        self.layers = parts.layers(prefixes, parts.shape.hidden_size, norms_input=True)
        self.norm = parts.norm("model.norm.weight", parts.shape.hidden_size)


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


def copy_side_files(target: Target, folder: Path) -> None:
    """Copy the tokenizer and the generation config."""
    for name in _SIDE_FILES:
        if (target.folder / name).is_file():
            shutil.copyfile(target.folder / name, folder / name)
