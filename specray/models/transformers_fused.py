"""Decoders of transformers' modules whose layers are those of Llama, as one call of the CPU kernels.

They are found by what their modules compute: the forward methods of the decoder and of its layers run once with other
functions in place of what they call.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specray.layers.norm import RMSNorm
from specray.models.transformers_layers import FlatAttention, FlatGatedUnits
from specray.models.transformers_skeleton import UNUSED_MASK_SHAPE, AttentionCall
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix
from specray.ops.cpu.packed_layers import LayerParts

_MAX_BYTES = 2 << 30  # of the tables of rotary positions
_AT_ONCE = 4096  # positions whose angles are computed together
_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def fused_body(
    body: Any, layers: Sequence[nn.Module], calls: Mapping[int, AttentionCall], max_positions: int
) -> tuple[FusedLayers, RMSNorm] | None:
    """(The layers of a decoder on one rank, its final norm), or None if the kernels do not have it.

    `body` and its `layers` are loaded: linears, norms and attention are replaced. `calls` are those of the layers.
    """
    parts = [part for part in map(_parts, layers) if part is not None]
    sizes = {(call.num_heads, call.num_kv_heads, call.qk_dim) for call in calls.values()}
    is_shared = any(call.source is not None for call in calls.values())
    if len(parts) != len(layers) or len(calls) != len(layers) or len(sizes) > 1 or is_shared:
        return None
    roles = _roles(body, layers)
    (shape,) = sizes
    if roles is None or max_positions * shape[2] * 8 > _MAX_BYTES:
        return None
    norm: RMSNorm = getattr(body, roles.norm)
    tables = _angles(getattr(body, roles.rotary), max_positions, shape[2])
    epsilons = {part.eps for layer in layers for part in layer.modules() if isinstance(part, RMSNorm)}
    if tables is None or epsilons != {norm.eps} or not _computes_llama(body, layers, roles, tables):
        return None
    cos, sin = tables
    half = shape[2] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), 1)
    return FusedLayers(parts[0].qkv.kernels, parts, *shape, norm.eps, (cos, signed)), norm


def _parts(layer: nn.Module) -> LayerParts | None:
    """The packed weights of a layer; None if it has other modules than Llama's, or is split over ranks."""
    modules = dict(layer.named_children())
    if modules.keys() != set(_LAYER) or any(True for _ in layer.named_parameters(recurse=False)):
        return None
    input_norm, attention, ffn_norm, ffn = map(modules.get, _LAYER)
    if not (isinstance(input_norm, RMSNorm) and isinstance(ffn_norm, RMSNorm)):
        return None
    if not (isinstance(attention, FlatAttention) and isinstance(ffn, FlatGatedUnits)):
        return None
    qkv, out, gate_up, down = attention.qkv_proj.run, attention.o_proj.run, ffn.run, ffn.down_proj.run
    if not (isinstance(qkv, PackedMatrix) and isinstance(out, PackedMatrix) and attention.o_proj.is_whole):
        return None
    if not (isinstance(gate_up, GatedMatrix) and isinstance(down, PackedMatrix) and ffn.down_proj.is_whole):
        return None
    norms = attention.q_norm, attention.k_norm
    if not all(norm is None or isinstance(norm, RMSNorm) for norm in norms):
        return None
    q_weight, k_weight = (norm.weight if isinstance(norm, RMSNorm) else None for norm in norms)
    return LayerParts(input_norm.weight, q_weight, k_weight, ffn_norm.weight, qkv, out, gate_up, down)


class _Roles(NamedTuple):
    """The names of a decoder's modules."""

    embedding: str
    layers: str
    norm: str
    rotary: str


def _roles(body: nn.Module, layers: Sequence[nn.Module]) -> _Roles | None:
    """None if a decoder has other modules than Llama's, or tensors beside them."""
    found: dict[str, str] = {}
    children = dict(body.named_children())
    for name, child in children.items():
        if type(child) is nn.Embedding:  # a class of its own may scale what it returns
            found["embedding"] = name
        elif isinstance(child, nn.ModuleList) and list(child) == list(layers):
            found["layers"] = name
        else:
            found["norm" if isinstance(child, RMSNorm) else "rotary"] = name
    has_tensors = any(True for _ in body.named_parameters(recurse=False))
    return _Roles(**found) if len(found) == len(children) == len(_Roles._fields) and not has_tensors else None


def _angles(rotary: Any, max_positions: int, dim: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin float32 [max_positions, dim] of a module; None if it gives something else."""
    parts = []
    for start in range(0, max_positions, _AT_ONCE):
        positions = torch.arange(start, min(start + _AT_ONCE, max_positions))[None]
        try:
            angles = rotary(torch.empty(1, 1), positions)
        except (RuntimeError, TypeError, AttributeError):  # it takes something else
            return None
        if not _are_angles(angles, (*positions.shape, dim)):
            return None
        parts.append(torch.cat(angles))
    cos, sin = torch.cat(parts, 1).float()
    return cos, sin


def _are_angles(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, tuple) and [getattr(part, "shape", None) for part in value] == [shape, shape]


@torch.no_grad()
def _computes_llama(body: Any, layers: Sequence[nn.Module], roles: _Roles, tables: tuple[Tensor, Tensor]) -> bool:
    """Whether a decoder's output is the norm of what its layers make of the embeddings, each as Llama's layers do.

    `tables` are the angles by which all must rotate.
    """
    rows = torch.tensor([0, len(tables[0]) - 1])
    x = expected = torch.linspace(-4.0, 4.0, 6).view(1, 2, 3)
    trials, attentions = [], []
    for number, layer in enumerate(layers):
        parts = _Line(0.5, 1.0), _Attention(number + 2.0), _Line(0.125, 3.0), _Line(0.5, 4.0)
        trials.append(_with_modules(layer, dict(zip(_LAYER, parts, strict=True))))
        attentions.append(parts[1])
        expected = expected + parts[1](parts[0](expected))[0]
        expected = expected + parts[3](parts[2](expected))
    norm = _Line(0.25, -1.0)
    stand_ins = _Given(x), nn.ModuleList(trials), norm, getattr(body, roles.rotary)
    trial = _with_modules(body, dict(zip(roles, stand_ins, strict=True)))
    mask = torch.empty(UNUSED_MASK_SHAPE)
    try:
        out = trial(input_ids=rows[None], position_ids=rows[None], attention_mask=mask, use_cache=False)
    except (RuntimeError, TypeError, AttributeError, KeyError, ValueError):  # it takes or does something else
        return False
    angles = [table[rows][None] for table in tables]
    shape = tuple(angles[0].shape)
    rotate_alike = all(
        _are_angles(attention.angles, shape) and all(map(torch.equal, attention.angles, angles))
        for attention in attentions
    )
    return rotate_alike and torch.equal(out[0], norm(expected))


def _with_modules(module: nn.Module, modules: dict[str, nn.Module]) -> Any:
    """A copy of a module with other children."""
    trial = copy(module)
    trial._modules = dict(modules)
    return trial


class _Line(nn.Module):
    """A function that commutes with no other of its kind."""

    def __init__(self, factor: float, shift: float) -> None:
        super().__init__()
        self._factor, self._shift = factor, shift

    def forward(self, x: Tensor) -> Tensor:
        return x * self._factor + self._shift


class _Attention(nn.Module):
    """In place of attention; keeps the angles that it gets."""

    angles: Any = None

    def __init__(self, shift: float) -> None:
        super().__init__()
        self._line = _Line(0.25, shift)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> tuple[Tensor, None]:
        self.angles = position_embeddings
        return self._line(hidden_states), None


class _Given(nn.Module):
    """In place of an embedding."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, _: Tensor) -> Tensor:
        return self._rows
