"""Exports a trained draft model as an ordinary model folder with config.json and tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from specray.train.draft_model import TrainedDraftModel
from specray.train.target import Target

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


def draft_tensors(model: TrainedDraftModel, target: Target) -> dict[str, Tensor]:
    """The trained tensors and the target's embeddings and output matrix."""
    shared = {"model.embed_tokens.weight": target.embedding}
    if not target.shape.tied:
        shared["lm_head.weight"] = target.head
    return model.state_dict() | shared


def draft_config(model: TrainedDraftModel, target: Target) -> dict[str, Any]:
    """The target's config.json with the kept layers only."""
    config: dict[str, Any] = json.loads((target.folder / "config.json").read_text(encoding="utf-8"))
    by_layer = {name: config[name] for name in ("layer_types",) if config.get(name)}
    chosen = {name: [values[layer] for layer in model.kept] for name, values in by_layer.items()}
    return config | {"num_hidden_layers": len(model.kept), "torch_dtype": "bfloat16", "dtype": "bfloat16"} | chosen


def copy_side_files(target: Target, folder: Path) -> None:
    """Copy the tokenizer and the generation config."""
    for name in _SIDE_FILES:
        if (target.folder / name).is_file():
            shutil.copyfile(target.folder / name, folder / name)
