"""FR-Spec: a file of frequent token ids, to which a draft head's output is restricted.

Verification still uses the whole vocabulary, so a map changes speed, never output. `specray train token-map` makes one.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_token_map
from specray.models.weights import read_torch_file
from specray.spec_decode.drafter import TargetFiles, TargetView

logger = logging.getLogger(__name__)


def configured_token_map(config: SpeculativeConfig, target: TargetView | TargetFiles) -> Tensor | None:
    """The ids of `speculative.token_map` and the target's EOS ids; None without a map."""
    if config.token_map is None:
        return None
    return load_token_map(resolve_token_map(config.token_map), target.shape.vocab_size, target.eos_token_ids)


def load_token_map(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Tensor:
    """int64 [n]: the ids in the file, in its order and each once, followed by EOS ids that it lacks.

    A .pt file holds a list or tensor written by torch.save, any other a JSON list. ConfigError for anything else.
    """
    ids = _read(path)
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
    if wrong or not ids:
        found = f"holds {len(wrong)} entries such as {wrong[0]!r:.40}" if wrong else "is empty"
        raise ConfigError(
            f"speculative.token_map={str(path)!r} {found}; it must list token ids from 0 to {vocab_size - 1}: "
            "use a map made for this target (specray train token-map)"
        )
    unique = list(dict.fromkeys((*ids, *eos_token_ids)))
    num_repeated = len(ids) - len(set(ids))
    if num_repeated:
        logger.warning("speculative.token_map=%s repeats %d ids; each is used once", path, num_repeated)
    return torch.tensor(unique, dtype=torch.int64)


def _read(path: Path) -> list[object]:
    content = _read_pt(path) if path.suffix in (".pt", ".pth", ".bin") else _read_json(path)
    if not isinstance(content, list):
        raise ConfigError(
            f"speculative.token_map={str(path)!r} holds a {type(content).__name__} instead of a list of token ids; "
            "make one with specray train token-map"
        )
    return content


def _read_pt(path: Path) -> object:
    loaded = read_torch_file(path, "save the ids with torch.save, or as a JSON list")
    return loaded.tolist() if isinstance(loaded, Tensor) and loaded.dim() == 1 else loaded


def _read_json(path: Path) -> object:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"speculative.token_map={str(path)!r} is not readable as a JSON list ({error}); give a .json or .pt file "
            "of token ids"
        ) from error
    return content
