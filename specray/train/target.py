"""The parts of a target that training uses. Its hidden states come from `shards`."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.files import resolve_model
from specray.models.llama_shape import LlamaShape
from specray.models.loading import EMBEDDING, Loader
from specray.models.registry import is_native, load_config


@dataclass(frozen=True, slots=True)
class Target:
    """Frozen parts of the target, in the training type."""

    name: str
    folder: Path
    config: PretrainedConfig
    shape: LlamaShape
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    norm: Tensor  # [H]
    rotary: RotaryEmbedding
    device: torch.device

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    @property
    def eos_ids(self) -> list[int]:
        ids = self.config.eos_token_id
        return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def check_native(name: str, config: PretrainedConfig) -> None:
    """ConfigError unless a class of ours computes the target `name`: training reads the weights as those classes do."""
    if not is_native(config):
        raise ConfigError(
            f"{name}: transformers' modules compute it, and heads and draft models are trained for native models "
            "only; choose another target"
        )


def load_target(name: str, dtype: torch.dtype, device: torch.device, num_positions: int) -> Target:
    """Load the target `name`, which is resolved as in the engine. ConfigError if nothing can be trained for it."""
    folder = resolve_model(name, None, "auto", progress=True)
    config = load_config(folder)
    check_native(name, config)
    shape = LlamaShape.of(config, RankGroup())
    loader = Loader(folder, "auto", dtype, device)
    try:
        vocab = (shape.vocab_size, shape.hidden_size)
        embedding = loader.tensor(EMBEDDING, vocab)
        output = loader.output_name(shape.tied)
        return Target(
            name=name,
            folder=folder,
            config=config,
            shape=replace(shape, tied=output == EMBEDDING),
            embedding=embedding,
            head=embedding if output == EMBEDDING else loader.tensor(output, vocab),
            norm=loader.tensor("model.norm.weight", (shape.hidden_size,)),
            rotary=RotaryEmbedding(config, shape.head_dim, num_positions, torch.float32, device),
            device=device,
        )
    finally:
        loader.close()
