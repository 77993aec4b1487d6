"""The layers of transformers' decoders that keep a state for each request, with our operations in place of theirs.

Such a layer keeps the matrices, norms and parameters of the module that it replaces, under their names, and gives what
lies between them to the states of the pass. See `specray.ops.states`.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specray.errors import ConfigError
from specray.layers.parallel import Part, RankGroup
from specray.ops.device_ops import ops_on
from specray.ops.states import AnyStateRows, StateOperation, States, StateShape
from specray.ops.states_torch import Convolution, DeltaNet

_SILU = ("silu", "swish")  # its names in transformers
# What `transformers_skeleton.computing` has set; None: the pass has no states.
states_of_pass: ContextVar[States | None] = ContextVar("states", default=None)


def _run(operation: StateOperation, *inputs: Tensor) -> Tensor:
    states = states_of_pass.get()
    assert states is not None, "an `attend` without states"
    return states.run(operation, *inputs)


class StateLayer(nn.Module):
    """A layer in place of one of transformers'."""

    if TYPE_CHECKING:  # the parts of the module

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, module: nn.Module) -> None:
        """Takes the parts of `module`."""
        super().__init__()
        self._modules, self._parameters = module._modules, module._parameters

    def split(self, group: RankGroup) -> dict[str, Part]:
        """Become a rank's part of the layer: which part of its tensors that is, by their names.

        They have their sizes when `plan` is called. ConfigError if the layer cannot be split.
        """
        raise NotImplementedError

    def plan(self) -> None:
        """Make `operations`, for tensors of these sizes."""
        raise NotImplementedError

    @property
    def operations(self) -> Sequence[StateOperation]:
        """Those that keep states, in the order in which they run."""
        raise NotImplementedError

    def pack(self) -> None:
        """To be called when all weights are there."""
        raise NotImplementedError


class _Convolve:
    """The short convolution of a layer."""

    def __init__(self, conv: Any, has_silu: bool) -> None:
        self._has_silu = has_silu
        channels, _, width = conv.weight.shape
        if width < 1:
            raise ConfigError(
                f"a convolution over {width} tokens; correct linear_conv_kernel_dim or conv_L_cache in config.json"
            )
        self.shape = StateShape((width - 1, channels), conv.weight.dtype, channels)

    def pack(self, conv: Any) -> None:
        bias = None if conv.bias is None else conv.bias.data.float()
        self._conv = Convolution(conv.weight.data[:, 0].t().float().contiguous(), bias, self._has_silu)
        self._ops = ops_on(conv.weight.device)

    def __call__(self, inputs: Sequence[Tensor], pool: Tensor, rows: AnyStateRows) -> Tensor:
        return self._ops.convolve(self._conv, inputs[0], pool, rows)


class _Delta:
    """The gated delta rule of a layer."""

    def __init__(self, layer: "GatedDeltaNet") -> None:
        heads, values = layer.num_v_heads, layer.num_v_heads * layer.v_dim
        channels = 2 * layer.num_k_heads * layer.k_dim + values
        self.shape = StateShape((heads, layer.k_dim, layer.v_dim), torch.float32, channels + 2 * heads + values)

    def pack(self, layer: "GatedDeltaNet") -> None:
        norm = layer.gated_norm
        rates, bias, weight = (part.data.float() for part in (layer.A_log, layer.dt_bias, norm.weight))
        sizes = layer.num_k_heads, layer.num_v_heads, layer.k_dim, layer.v_dim
        self._net = DeltaNet(*sizes, -rates.exp(), bias, weight, norm.variance_epsilon, layer.beta_scale)
        self._ops = ops_on(weight.device)

    def __call__(self, inputs: Sequence[Tensor], pool: Tensor, rows: AnyStateRows) -> Tensor:
        qkv, a, b, z = inputs
        return self._ops.gated_delta(self._net, qkv, a, b, z, pool, rows)


class GatedDeltaNet(StateLayer):
    """Qwen3.5's: one matrix each for queries, keys and values, for the gate, and for what changes the state."""

    beta_scale = 1.0

    def __init__(self, module: Any) -> None:
        """Takes the parts of `module`. ConfigError if it is configured to compute something else."""
        super().__init__(module)
        self.num_k_heads, self.num_v_heads = module.num_k_heads, module.num_v_heads
        self.k_dim, self.v_dim = module.head_k_dim, module.head_v_dim
        kind = type(module).__name__
        for activation in (module.activation, self.gated_norm.activation):
            if activation not in _SILU:
                raise ConfigError(f"{kind} asks for {activation}, but is computed with silu only; choose another model")
        sizes = self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim
        if min(sizes) < 1 or self.num_v_heads % self.num_k_heads:
            raise ConfigError(
                f"{kind} has {self.num_k_heads} key heads of {self.k_dim} and {self.num_v_heads} value heads of "
                f"{self.v_dim}; value heads must be a multiple of key heads, and all positive: correct "
                "linear_num_*_heads and linear_*_head_dim in config.json"
            )
        self.plan()

    def split(self, group: RankGroup) -> dict[str, Part]:
        if self.num_k_heads % group.size:
            raise _indivisible(group, self.num_k_heads, "key heads")
        keys, values = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        of_heads = _part(group, self.num_v_heads)
        parts = {"conv1d.weight": _part(group, keys, keys, values), "A_log": of_heads, "dt_bias": of_heads}
        parts |= self._split_matrices(group, keys, values)
        self.num_k_heads, self.num_v_heads = self.num_k_heads // group.size, self.num_v_heads // group.size
        return parts

    def plan(self) -> None:
        self._convolve, self._delta = _Convolve(self.conv1d, has_silu=True), _Delta(self)

    @property
    def operations(self) -> Sequence[StateOperation]:
        return self._convolve, self._delta

    @property
    def gated_norm(self) -> Any:
        return self.norm

    def pack(self) -> None:
        self._convolve.pack(self.conv1d)
        self._delta.pack(self)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[1, T, hidden] of the same."""
        qkv, a, b, z = self._project(hidden_states[0])
        return self._output(_run(self._delta, _run(self._convolve, qkv), a, b, z))[None]

    def _split_matrices(self, group: RankGroup, keys: int, values: int) -> dict[str, Part]:
        """`split` of the matrices; queries and keys have `keys` rows each."""
        return {
            "in_proj_qkv.weight": _part(group, keys, keys, values),
            "in_proj_z.weight": _part(group, values),
            "in_proj_a.weight": _part(group, self.num_v_heads),
            "in_proj_b.weight": _part(group, self.num_v_heads),
            "out_proj.weight": _part(group, values, dim=1),
        }

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries, keys and values [T, channels], a, b [T, heads], z [T, values]) of x [T, hidden]."""
        return self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x), self.in_proj_z(x)

    def _output(self, mixed: Tensor) -> Tensor:
        result: Tensor = self.out_proj(mixed)
        return result


class Qwen3NextDeltaNet(GatedDeltaNet):
    """Two matrices, whose outputs lie together for each key head."""

    def _split_matrices(self, group: RankGroup, keys: int, values: int) -> dict[str, Part]:
        return {
            "in_proj_qkvz.weight": _part(group, 2 * keys + 2 * values),
            "in_proj_ba.weight": _part(group, 2 * self.num_v_heads),
            "out_proj.weight": _part(group, values, dim=1),
        }

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        group = self.num_v_heads // self.num_k_heads
        values = group * self.v_dim
        heads = self.in_proj_qkvz(x).view(len(x), self.num_k_heads, -1)
        *qkv, z = (part.flatten(1) for part in heads.split_with_sizes((self.k_dim, self.k_dim, values, values), -1))
        b, a = self.in_proj_ba(x).view(len(x), self.num_k_heads, 2 * group).split_with_sizes((group, group), -1)
        return torch.cat(qkv, -1), a.flatten(1), b.flatten(1), z


class OlmoDeltaNet(GatedDeltaNet):
    """A matrix for each input, and betas up to 2 where the configuration allows negative eigenvalues."""

    def __init__(self, module: Any) -> None:
        self.beta_scale = 2.0 if module.allow_neg_eigval else 1.0
        super().__init__(module)

    @property
    def gated_norm(self) -> Any:
        return self.o_norm

    def _split_matrices(self, group: RankGroup, keys: int, values: int) -> dict[str, Part]:
        rows = {"q": keys, "k": keys, "v": values, "g": values, "a": self.num_v_heads, "b": self.num_v_heads}
        parts = {f"{name}_proj.weight": _part(group, length) for name, length in rows.items()}
        return parts | {"o_proj.weight": _part(group, values, dim=1)}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        return qkv, self.a_proj(x), self.b_proj(x), self.g_proj(x)

    def _output(self, mixed: Tensor) -> Tensor:
        result: Tensor = self.o_proj(mixed)
        return result


class ShortConvolution(StateLayer):
    """LFM2's: a gated convolution over a few tokens."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.plan()

    def split(self, group: RankGroup) -> dict[str, Part]:
        if (size := len(self.conv.weight)) % group.size:
            raise _indivisible(group, size, "channels")
        inputs, channels = _part(group, size, size, size), _part(group, size)
        parts = {"in_proj.weight": inputs, "conv.weight": channels, "out_proj.weight": _part(group, size, dim=1)}
        return parts if self.conv.bias is None else parts | {"in_proj.bias": inputs, "conv.bias": channels}

    def plan(self) -> None:
        self._convolve = _Convolve(self.conv, has_silu=False)

    @property
    def operations(self) -> Sequence[StateOperation]:
        return (self._convolve,)

    def pack(self) -> None:
        self._convolve.pack(self.conv)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[1, T, hidden] of the same."""
        before, after, x = self.in_proj(hidden_states[0]).chunk(3, -1)
        result: Tensor = self.out_proj(after * _run(self._convolve, before * x))
        return result[None]


_LAYERS: dict[str, type[StateLayer]] = {
    "Qwen3NextGatedDeltaNet": Qwen3NextDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": OlmoDeltaNet,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}


def _part(group: RankGroup, *lengths: int, dim: int = 0) -> Part:
    """A rank's equal share of each of the rows that lie one behind the other."""
    ends = list(accumulate(lengths, initial=0))
    shares = [(start, group.share(length)) for start, length in zip(ends, lengths, strict=False)]
    return Part(dim, tuple(slice(start + share.start, start + share.stop) for start, share in shares), ends[-1])


def _indivisible(group: RankGroup, count: int, what: str) -> ConfigError:
    return ConfigError(
        f"tp_size={group.size} does not divide the {count} {what} of a layer with states; choose another tp_size"
    )


def replace_state_layers(model: Any) -> None:
    """Put our layers in place of those of `model` that keep a state and that we compute."""
    for path, module in list(model.named_modules()):
        if (layer := _LAYERS.get(type(module).__name__)) is not None:
            model.set_submodule(path, layer(module))


def state_layers(model: nn.Module) -> list[StateLayer]:
    """In the order in which they run."""
    return [module for module in model.modules() if isinstance(module, StateLayer)]
