"""Rotary positions in the half-split form: pairs are (x[i], x[i + dim/2])."""

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.errors import ConfigError
from specray.ops.gpu import uses_triton

# Kinds whose frequencies do not depend on the length of the request.
_KINDS = ("default", "linear", "llama3", "yarn")
MAX_THETA = 1e30
_MAX_BYTES = 2 << 30  # of the tables: 2 million positions of 128 dimensions


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
        frequencies, scale = _frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._dtype, self._uses_triton = dtype, uses_triton(device)
        self.tables = torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) of positions int64 [T], each [T, 1, dim]; computed once per step for all layers."""
        if self._uses_triton:
            from specray.ops.gpu import layers

            return layers.angles_at(self.tables, positions, self._dtype)
        cos, sin = (table.index_select(0, positions).to(self._dtype)[:, None] for table in self.tables)
        return cos, sin


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [T, heads, dim] in place; rolling by half swaps the pairs, and the sign is in `sin`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def _frequencies(config: PretrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the attention scale of the checkpoint's kind of RoPE."""
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in _KINDS:
        raise ConfigError(f"the checkpoint uses rope_type={kind!r}; supported are {', '.join(_KINDS)}")
    theta = rope.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not 0.0 < theta < MAX_THETA:
        raise ConfigError(f"the checkpoint's rope_theta={theta!r} must be a number above 0; correct config.json")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / float(theta) ** exponents, 1.0  # torch takes no large integer
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(scale)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's parameters of rope_type={kind} cannot be used: {error!r}") from error
