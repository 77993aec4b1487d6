"""The layers that take the place of transformers' own: packed linears, and experts as packed linears.

They compute each row of a batch alike, whatever the other rows are, where `specray.ops.linear` has such kernels.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.models.transformers_skeleton import (
    AttentionCall,
    AttentionFunction,
    attention_of_pass,
    computing,
    unavailable_experts,
)
from specray.ops.device_ops import ops_on
from specray.ops.linear import concat, is_row_wise, make_gated, make_linear, take_columns, take_rows
from specray.ops.quantised_weight import QuantisedWeight, Weight
from specray.ops.torch_matrix import Linear

if TYPE_CHECKING:
    from specray.ops.gpu.experts import ExpertMatrices  # triton is installed on machines with GPUs only


class FlatLinear(Layer):
    """y = x W^T + b for x [..., in], in place of an nn.Linear. Modules ask `weight`, which is empty, for its type.

    `group`: of the ranks that each have some columns of W and of x; their results are added.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        quantization: str | None,
        dtype: torch.dtype,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self._group = group or RankGroup()
        bias = bias if self._group.leads else None  # added once in the sum over ranks
        self.weight = torch.empty(0, dtype=weight.dtype if isinstance(weight, Tensor) else dtype)
        self.out_features, self.in_features = weight.shape
        self.is_whole = self._group.size == 1
        self.run = make_linear(weight, bias, quantization)

    def forward(self, x: Tensor) -> Tensor:
        rows = self._group.sum(self.run(x.reshape(-1, self.in_features)))
        return rows.view(*x.shape[:-1], self.out_features)


class FlatGatedUnits(Layer):
    """down(silu(gate(x)) * up(x)) for x [..., in], in place of a module that `computes_gated_units`."""

    def __init__(
        self,
        gate: Weight,
        up: Weight,
        down: Weight,
        quantization: str | None,
        dtype: torch.dtype,
        group: RankGroup | None = None,
    ) -> None:
        """`group`: of the ranks that each have some rows of gate and up, and columns of down."""
        super().__init__()
        self.run = make_gated(gate, up, quantization)
        self.down_proj = FlatLinear(down, None, quantization, dtype, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.run(x.reshape(-1, x.shape[-1]))).view(x.shape)


def computes_gated_units(module: nn.Module) -> bool:
    """Whether a module is FlatGatedUnits of its three linears. It is tried with other functions in their place."""
    linears = ("gate_proj", "up_proj", "down_proj")
    own = {name: part for name, part in module.named_children() if name != "act_fn"}
    if own.keys() != set(linears) or any(type(part) is not nn.Linear or part.bias is not None for part in own.values()):
        return False
    if any(True for _ in module.named_parameters(recurse=False)):
        return False
    trial = copy(module)
    trial._modules = {**module._modules, "gate_proj": _Times(2.0), "up_proj": _Times(3.0), "down_proj": _Times(5.0)}
    x = torch.linspace(-4.0, 4.0, 64).view(1, 8, 8)
    try:
        return torch.equal(trial(x), F.silu(x * 2.0) * (x * 3.0) * 5.0)
    except (RuntimeError, TypeError, AttributeError):  # it takes or does something else
        return False


def as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """The kernel's norm that computes what `module` does; None if it is another function, or has no kernel."""
    weight = module._parameters.get("weight")
    if weight is None or not ops_on(weight.device).has_norm_kernel or (shift := weight_shift(module)) is None:
        return None
    return RMSNorm(shifted(weight.data, shift), _eps(module))


def weight_shift(module: nn.Module) -> float | None:
    """What a root-mean-square norm adds to its weight; None if it is another function. It is tried out."""
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or not _eps(module):
        return None
    if len(module._parameters) != 1:
        return None
    trial, size = copy(module), (len(weight),)
    tried = torch.linspace(-1.0, 2.0, *size)
    trial._parameters = {"weight": nn.Parameter(tried)}
    x = torch.linspace(-3.0, 4.0, 3 * len(weight)).sin().view(3, -1)
    with torch.no_grad():
        result = trial(x)
    for shift in (0.0, 1.0):  # Gemma's weights are differences from 1
        if torch.allclose(result, F.rms_norm(x, size, tried + shift, _eps(module)), rtol=1e-5, atol=1e-5):
            return shift
    return None


def shifted(weight: Tensor, shift: float) -> Tensor:
    """The weight of a norm that adds nothing to it, of the same type."""
    return weight.float().add(shift).to(weight.dtype) if shift else weight


def _eps(module: Any) -> float:
    eps: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps or 0.0


class FlatAttention(nn.Module):
    """Self-attention of rotated queries and keys, in place of a module that `computes_rotary_attention`.

    One product gives queries, keys and values. `call` is what the module asked of attention. `q_norm` and `k_norm` are
    norms of each head, or None.
    """

    def __init__(
        self,
        parts: Sequence[dict[str, Any]],
        out: nn.Module,
        call: AttentionCall,
        quantization: str | None,
        dtype: torch.dtype,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        """`parts` are the weights and biases of queries, keys and values."""
        super().__init__()
        biases = [part["bias"] for part in parts if "bias" in part]  # of all or of none
        bias = torch.cat(biases) if biases else None
        self.qkv_proj = FlatLinear(concat(*(part["weight"] for part in parts)), bias, quantization, dtype)
        self.o_proj = out
        self.q_norm, self.k_norm = q_norm, k_norm
        self._call = call

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] of the same; cos and sin are [1, T, dim]."""
        call = self._call
        heads = self.qkv_proj(hidden_states).view(*hidden_states.shape[:2], -1, call.qk_dim)
        rotated, values = heads.split_with_sizes((call.num_heads + call.num_kv_heads, call.num_kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = rotated.split_with_sizes((call.num_heads, call.num_kv_heads), 2)
            rotated = torch.cat((self.q_norm(queries), self.k_norm(keys)), 2)
        cos, sin = (part[:, :, None] for part in position_embeddings)
        first, second = rotated.chunk(2, -1)
        rotated = (rotated * cos + torch.cat((-second, first), -1) * sin).to(heads.dtype)  # OLMo's are float32
        queries, keys = rotated.split_with_sizes((call.num_heads, call.num_kv_heads), 2)
        q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))
        seen = attention_of_pass()(q, k, v, call)
        return self.o_proj(seen.flatten(2)), None


def computes_rotary_attention(module: nn.Module, call: AttentionCall) -> bool:
    """Whether a module is FlatAttention of its four linears. It is tried with other functions in their place."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    own = dict(module.named_children())
    if (
        own.keys() - {"q_norm", "k_norm"} != set(names)
        or len(own) == 5
        or any(type(own[name]) is not nn.Linear for name in names)
    ):
        return False
    biases = {own[name].bias is None for name in names[:3]}
    if any(True for _ in module.named_parameters(recurse=False)) or call.sinks is not None or len(biases) > 1:
        return False
    if call.qk_dim != call.v_dim or call.qk_dim % 2:
        return False
    trial, dim = copy(module), call.qk_dim
    factors = dict(zip(names, (2.0, 3.0, 5.0, 7.0), strict=True))
    weight = torch.linspace(0.5, 3.0, dim) if "q_norm" in own else torch.ones(dim)  # in place of norms of each head
    trial._modules = {name: _Times(factors.get(name, weight)) for name in own}
    x, angles = (
        torch.linspace(-4.0, 4.0, 6 * dim).view(1, 3, 2 * dim),
        torch.linspace(0.1, 2.0, 3 * dim).view(1, 3, dim),
    )
    cos, sin = angles.cos(), angles.sin()

    def rotated(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        return rows * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    heads = x.view(1, 3, 2, dim).transpose(1, 2)
    expected = rotated(heads * 2.0 * weight), rotated(heads * 3.0 * weight), heads * 5.0
    found: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:  # noqa: ARG001
        found.extend((q, k, v))
        return v.transpose(1, 2).contiguous()

    try:
        with torch.no_grad(), computing(attention, unavailable_experts):
            result = trial(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # it takes or does something else
        return False
    if not _needs_full_width(trial, x, (cos[..., : dim // 2], sin[..., : dim // 2]), attention):
        return False  # it may rotate a part of each head
    is_same = len(found) >= len(expected) and all(map(torch.equal, found, expected))
    return is_same and isinstance(result, tuple) and len(result) == 2 and torch.equal(result[0], x * 5.0 * 7.0)


def _needs_full_width(
    trial: nn.Module, x: Tensor, position_embeddings: tuple[Tensor, Tensor], attention: AttentionFunction
) -> bool:
    """Whether an attention module cannot take angles for a part of each head only."""
    try:
        with torch.no_grad(), computing(attention, unavailable_experts):
            trial(hidden_states=x, position_embeddings=position_embeddings, attention_mask=None)
    except RuntimeError:
        return True
    return False


class _Times(nn.Module):
    def __init__(self, factor: float | Tensor) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self._factor


class PackedExperts:
    """The experts of one of transformers' modules, one after the other, each for its tokens.

    The module keeps its activation and how it combines gate and up. A token's sum runs in the order of the experts.
    """

    def __init__(self, ups: Sequence[Linear], downs: Sequence[Linear], group: RankGroup) -> None:
        """Each rank of `group` has a part of every expert."""
        self._ups, self._downs, self._group = ups, downs, group

    @property
    def is_row_wise(self) -> bool:
        """Whether a token's result has the same bits whatever the other tokens are."""
        return all(map(is_row_wise, (*self._ups, *self._downs)))

    def __call__(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] from hidden [T, hidden], chosen int64 [T, k] and weights [T, k]."""
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        # A host copy, which saves the experts without tokens. Modules write the number of experts for "none".
        for index in sorted(set(chosen.flatten().tolist()) - {len(self._ups)}):
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            result = _finished(module, self._downs[index](_activated(module, self._ups[index](hidden[tokens]))))
            out.index_add_(0, tokens, result.float() * weights[tokens, places, None].float())
        return self._group.sum(out).to(hidden.dtype)


class GroupedPackedExperts:
    """PackedExperts in Triton's grouped product. A token's sum runs in the order of the router's preference."""

    def __init__(self, ups: "ExpertMatrices", downs: "ExpertMatrices", group: RankGroup) -> None:
        self._ups, self._downs, self._group = ups, downs, group

    def __call__(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See PackedExperts; nothing is read on the host."""
        is_none = chosen == self._ups.num_experts
        pairs = self._ups.pairs(chosen.masked_fill(is_none, 0))
        inner = _activated(module, self._ups(hidden, pairs, hidden.dtype))
        result = _finished(module, self._downs(inner, pairs.of_own_rows, hidden.dtype))
        parts = result.view(*chosen.shape, -1).float() * weights[..., None].float()
        return self._group.sum(parts.masked_fill(is_none[..., None], 0.0).sum(1)).to(hidden.dtype)


def _activated(module: Any, inner: Tensor) -> Tensor:
    activated: Tensor = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return activated


def _finished(module: Any, result: Tensor) -> Tensor:
    return module.post_expert_norm(result) if module.has_post_expert_norm else result


def is_experts(module: nn.Module) -> bool:
    """Whether a module's weights are those of transformers' experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def pack_experts(
    module: Any,
    stored: Mapping[str, Sequence[QuantisedWeight]],
    quantization: str | None,
    group: RankGroup,
    at_once: bool,
) -> PackedExperts | GroupedPackedExperts:
    """Takes the weights out of `module`, but for those that are `stored`: each expert's [out, in], by the parameter.

    Each rank of `group` gets a part of every expert.
    """
    ups, up_biases = _taken(module, "gate_up_proj" if module.has_gate else "up_proj", stored)
    downs, down_biases = _taken(module, "down_proj", stored)
    if group.size > 1:
        part = group.share(downs[0].shape[1])
        units = _units(module, torch.arange(ups[0].shape[0]), part)
        ups, downs = [take_rows(up, units) for up in ups], [take_columns(down, part) for down in downs]
        up_biases = up_biases if up_biases is None else up_biases[:, units]
        down_biases = down_biases if group.leads else None  # added once in the sum over ranks
    if at_once:
        from specray.ops.gpu.experts import ExpertMatrices

        return GroupedPackedExperts(ExpertMatrices(ups, up_biases), ExpertMatrices(downs, down_biases), group)
    up_linears, down_linears = (
        [
            make_linear(weight, None if biases is None else biases[index], quantization)
            for index, weight in enumerate(weights)
        ]
        for weights, biases in ((ups, up_biases), (downs, down_biases))
    )
    return PackedExperts(up_linears, down_linears, group)


def _taken(
    module: Any, name: str, stored: Mapping[str, Sequence[QuantisedWeight]]
) -> tuple[Sequence[Tensor | QuantisedWeight], Tensor | None]:
    """Each expert's matrix [out, in] of parameter `name`, and their biases [experts, out]."""
    weights: Sequence[Tensor | QuantisedWeight] | None = stored.get(name)
    if weights is None:
        rows = getattr(module, name).data
        weights = [(matrix.t() if module.is_transposed else matrix).contiguous() for matrix in rows]
    biases: Tensor | None = getattr(module, f"{name}_bias").data if module.has_bias else None
    for parameter in (name, f"{name}_bias") if module.has_bias else (name,):
        delattr(module, parameter)
    return weights, biases


def _units(module: Any, rows: Tensor, part: slice) -> Tensor:
    """The rows of some units: of their gates and ups, which lie behind each other or alternate."""
    if not module.has_gate:
        return rows[part]
    if module.is_concatenated:
        gate, up = rows.chunk(2)
        return torch.cat((gate[part], up[part]))
    return rows[2 * part.start : 2 * part.stop]


def has_row_wise_products(body: nn.Module) -> bool:
    """Whether all replaced linears and experts give a row the same bits whatever the other rows are."""
    functions: list[Any] = [part.run for part in body.modules() if isinstance(part, FlatLinear | FlatGatedUnits)]
    functions += [part.packed_experts for part in body.modules() if hasattr(part, "packed_experts")]
    return all(map(is_row_wise, functions))
