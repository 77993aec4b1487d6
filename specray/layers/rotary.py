"""Rotary positions in the half-split form: pairs are (x[i], x[i + dim/2])."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.errors import ConfigError
from specray.ops.device_ops import ops_on

# Up to the original context, the frequencies of the last two kinds do not depend on the length of the request.
_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
MAX_THETA = 1e30
_MAX_BYTES = 2 << 30  # of the tables: 2 million positions of 128 dimensions


def num_positions(config: PretrainedConfig) -> int:
    """Positions for which the checkpoint's kind of RoPE was made, or those for which it is computed here if fewer.

    Scaling multiplies the original context by its factor: YaRN's is often larger than max_position_embeddings, as in
    Qwen3's recipe.
    """
    rope, stored = _rope(config), int(config.max_position_embeddings)
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind not in (*_KINDS, *ROPE_INIT_FUNCTIONS):
        raise _unknown(kind)
    factor = 1.0 if factor is None else factor
    original = rope.get("original_max_position_embeddings")
    original = stored if original is None else original
    for name, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise ConfigError(f"the checkpoint's rope parameter {name}={value!r} must be a number above 0; correct it")
    if kind == "linear":
        return int(stored * factor)
    if kind == "yarn":
        return max(stored, int(original * factor))
    return int(original) if kind == "longrope" else stored


def has_fixed_length(config: PretrainedConfig) -> bool:
    """Whether the frequencies of the checkpoint's RoPE change once a request is longer than `num_positions`.

    Such a request's KV would depend on how long the request becomes.
    """
    return _rope(config).get("rope_type") in ("dynamic", "longrope")


class RotaryEmbedding:
    """Tables of cos and signed sin for positions 0 … max_positions - 1, float32 [max_positions, dim]."""

    def __init__(
        self, config: PretrainedConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        longest = _MAX_BYTES // (2 * 4 * head_dim)
        if max_positions > longest:
            raise ConfigError(
                f"tables of rotary positions for a context of {max_positions} tokens would take more than "
                f"{_MAX_BYTES >> 30} GiB; set context_length <= {longest}"
            )
        if has_fixed_length(config) and max_positions > num_positions(config):
            raise ConfigError(
                f"rope_type={_rope(config)['rope_type']} is computed for {num_positions(config)} positions, the "
                f"original context, not for {max_positions}; set context_length <= {num_positions(config)}"
            )
        frequencies, scale = _frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._dtype, self._ops = dtype, ops_on(device)
        self.tables = torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) of positions int64 [T], each [T, 1, dim]; computed once per step for all layers."""
        return self._ops.angles_at(self.tables, positions, self._dtype)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [T, heads, dim] in place; rolling by half swaps the pairs, and the sign is in `sin`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _frequencies(config: PretrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the attention scale of the checkpoint's kind of RoPE."""
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind not in _KINDS:
        raise _unknown(kind)
    theta = rope.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not 0.0 < theta < MAX_THETA:
        raise ConfigError(f"the checkpoint's rope_theta={theta!r} must be a number above 0; correct config.json")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / float(theta) ** exponents, 1.0  # torch takes no large integer
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        frequencies, scale = frequencies.float(), float(scale)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's parameters of rope_type={kind} cannot be used: {error!r}") from error
    if not (all(map(math.isfinite, frequencies.tolist())) and abs(scale) <= torch.finfo(torch.float32).max):
        raise ConfigError(f"the checkpoint's parameters of rope_type={kind} give frequencies that are not finite")
    return frequencies, scale


def _unknown(kind: object) -> ConfigError:
    return ConfigError(
        f"the checkpoint uses rope_type={kind!r}; supported are {', '.join(_KINDS)}: correct config.json, or choose "
        "another model"
    )
