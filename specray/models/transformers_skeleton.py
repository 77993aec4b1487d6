"""transformers' own decoder of a configuration, without weights, and how its layers call attention.

Only classes that transformers itself contains are built; no code of a checkpoint runs. They live on the meta device,
so that a model of any size takes no memory, and a pass over it says which attention each layer computes. Importing this
module takes seconds, because it imports transformers' models.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from threading import Lock
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specray.errors import ConfigError
from specray.models.transformers_states import replace_state_layers, state_layers, states_of_pass
from specray.ops.states import StateOperation, States

IMPLEMENTATION = "specray"  # the name of our functions in transformers' interfaces
# A mask of four dimensions is taken as it is. Ours is never read: AttentionBatch says which keys a query sees.
UNUSED_MASK_SHAPE = (1, 1, 1, 1)
# Chunked and sparse attention are full attention in a short context: see `specray.models.registry.context_length`.
_SPARSE = {"chunked_attention", "indexed_attention", "minimax_m3_sparse"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"} | _SPARSE


class AttentionFunction(Protocol):
    """What a pass's layers call, in their order, each once."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: "AttentionCall") -> Tensor:
        """[1, T, heads, v_dim] from q [1, heads, T, qk_dim], k [1, kv_heads, T, qk_dim], v [1, kv_heads, T, v_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What a layer asks of attention. Sizes are those of the tensors that it passes."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float | None  # None: 1 / sqrt(qk_dim)
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]
    source: int | None = None  # place of an earlier call, whose keys and values it attends to instead of its own

    @property
    def kind(self) -> tuple[float | None, ...]:
        """What calls share that attend alike, apart from their sinks."""
        sizes = (self.num_heads, self.num_kv_heads, self.qk_dim, self.v_dim)
        return (*sizes, self.scale, self.window, self.softcap)

    @property
    def has_default_scale(self) -> bool:
        """Whether scores are divided by the root of the width of queries and keys."""
        return self.scale is None or math.isclose(self.scale, self.qk_dim**-0.5, rel_tol=1e-12)


# What layers pass to attention beside the arguments of `_attend` and needs nothing of it: positions are in q and k, and
# the indices are those of sparse attention, see `_NoIndexer`.
_UNREAD = {"dropout", "output_attentions", "position_ids", "use_cache", "indices", "block_indices"}

_attention: ContextVar[AttentionFunction] = ContextVar("attention")
# experts(module, hidden [T, hidden], chosen int64 [T, k], weights [T, k]) -> [T, hidden]
Experts = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
_experts: ContextVar[Experts] = ContextVar("experts")


@contextmanager
def computing(attention: AttentionFunction, experts: Experts, states: States | None = None) -> Iterator[None]:
    """Within it, transformers' modules call these."""
    tokens = _attention.set(attention), _experts.set(experts), states_of_pass.set(states)
    try:
        yield
    finally:
        _attention.reset(tokens[0])
        _experts.reset(tokens[1])
        states_of_pass.reset(tokens[2])


def attention_of_pass() -> AttentionFunction:
    """What `computing` has set."""
    return _attention.get()


def unavailable_experts(*_: object) -> Tensor:
    """Experts of a pass that has none."""
    raise AssertionError("a pass without experts")


class ShapesOfStates:
    """States of a pass that computes shapes only."""

    def run(self, operation: StateOperation, *inputs: Tensor) -> Tensor:  # noqa: ARG002
        return torch.empty_like(inputs[-1])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """See AttentionInterface."""
    if not _UNREAD.issuperset(others):
        _refuse(module, {name for name, value in others.items() if value is not None} - _UNREAD)
    heads, kv_heads = query.shape[1], key.shape[1]
    call = AttentionCall(heads, kv_heads, query.shape[-1], value.shape[-1], scaling, sliding_window, softcap, s_aux)
    return _attention.get()(query, key, value, call), None


def _refuse(module: nn.Module, asked: Collection[str]) -> None:
    """ConfigError if `asked` names something that a layer asks of attention and that changes its result."""
    if asked:
        raise ConfigError(
            f"{type(module).__name__} asks attention for {min(asked)}, which is not computed; choose another model"
        )


def _mix(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """See ExpertsInterface."""
    return _experts.get()(module, hidden_states, top_k_index, top_k_weights)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
ExpertsInterface.register(IMPLEMENTATION, _mix)


_BUILDING = Lock()  # transformers changes torch's functions and default type while it builds a model


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """transformers' causal language model (a PreTrainedModel) on the meta device. ConfigError if it has none.

    Of an image or audio model (`multimodal_config`, see `load_config`) it is the model itself, without what reads
    images and sounds: some language models have no class of their own. Its attention, experts and layers with
    states call what `computing` sets.
    """
    try:
        with _BUILDING, torch.device("meta"), no_init_weights():
            model = _from_config(config, dtype)
    except KeyError as error:
        if IMPLEMENTATION not in error.args:  # config.json names a function that transformers has not
            name = next((key for key, value in vars(config).items() if value in error.args), "something")
            raise ConfigError(
                f"config.json of model_type={config.model_type} has {name}={error}, which transformers does not know; "
                "correct it"
            ) from error
        raise ConfigError(
            f"transformers' modules of model_type={config.model_type} do not call an attention function that can be "
            "replaced, so there are no KV blocks and no draft trees for them; choose another model"
        ) from error
    except Exception as error:  # the classes raise whatever their arithmetic on a damaged configuration raises
        raise ConfigError(
            f"transformers cannot build model_type={config.model_type} from config.json: {' '.join(str(error).split())}"
        ) from error
    if any(hasattr(module, "has_gate") for module in model.modules()):  # of use_experts_implementation
        model.set_experts_implementation(IMPLEMENTATION)
    for module in model.modules():
        if not hasattr(module, "has_gate") and _mixes_gated_units(module):
            _declare_experts(module)
    if hasattr(config, "multimodal_config"):
        _remove_encoders(model)
    for module in list(model.modules()):
        if isinstance(getattr(module, "indexer", None), nn.Module):
            module.indexer = _NoIndexer()
    replace_state_layers(model)
    return model.eval()


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    make: Any
    options: Any = {"attn_implementation": IMPLEMENTATION, "dtype": dtype, "trust_remote_code": False}
    if hasattr(config, "multimodal_config"):
        make = AutoModelForMultimodalLM.from_config
        try:
            return make(config.multimodal_config, **options)
        except ImportError:  # of a package that its encoders need
            if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                raise
    make = AutoModelForCausalLM.from_config
    return make(config, **options)


def _declare_experts(module: Any) -> None:
    """Let a module call our experts, as transformers' use_experts_implementation does. It lacks for Step-3.5's."""
    module.has_gate = module.is_concatenated = True
    module.has_bias = module.is_transposed = module.has_post_expert_norm = False
    module.forward = MethodType(_mix, module)


def _mixes_gated_units(module: Any) -> bool:
    """Whether a module computes gated units of its experts' matrices. It is tried with other matrices."""
    names = ("gate_up_proj", "down_proj")
    if module._parameters.keys() != set(names) or not hasattr(module, "_apply_gate"):
        return False
    trial = copy(module)
    trial.num_experts = count = 2
    ups, downs = (torch.linspace(-1.0, 1.0, 24).view(count, 6, 2), torch.linspace(1.0, -2.0, 12).view(count, 2, 3))
    trial._parameters = dict(zip(names, map(nn.Parameter, (ups, downs)), strict=True))
    x, chosen, weights = torch.linspace(-2.0, 3.0, 6).view(3, 2), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    try:
        with torch.no_grad():
            units = [module._apply_gate(up @ row) for up, row in zip(ups[chosen[:, 0]], x, strict=True)]
            expected = torch.stack([down @ unit for down, unit in zip(downs[chosen[:, 0]], units, strict=True)])
            return torch.allclose(trial(x, chosen, weights), expected, rtol=1e-5, atol=1e-5)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # it takes or does something else
        return False


class _NoIndexer(nn.Module):
    """In place of what chooses the keys of sparse attention: a context is served in which it would choose all."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states[..., :0]


def _remove_encoders(model: Any) -> None:
    """Leave only the language model and its output matrix: nothing else is loaded."""
    kept = decoder_of(model), model.get_output_embeddings()
    for holder in [part for part in model.modules() if part is not kept[0] and kept[0] in part.modules()]:
        for name, child in list(holder.named_children()):
            if not any(part in child.modules() for part in kept):
                setattr(holder, name, nn.Identity())


def attention_calls(model: Any) -> dict[int, AttentionCall]:
    """How each layer of a skeleton with keys and values calls attention, by layer, in order.

    ConfigError if another layer keeps something that we do not compute, or a layer masks in a way that it does not
    pass on.
    """
    calls: list[AttentionCall] = []
    keys: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        source = next((place for place, earlier in enumerate(keys) if earlier is k), None)
        calls.append(replace(call, source=source))
        keys.append(k)
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])

    config = model.config.get_text_config(decoder=True)
    layers = _attention_layers(config, model)
    try:
        with (
            torch.no_grad(),
            torch.device("meta"),
            computing(attention, lambda _, hidden, *__: torch.empty_like(hidden), ShapesOfStates()),
            _unchecked_distributions(),
        ):
            zeros, mask = torch.zeros(1, 2, dtype=torch.int64), torch.empty(UNUSED_MASK_SHAPE)
            decoder_of(model)(input_ids=zeros, position_ids=zeros, attention_mask=mask, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers' modules of model_type={config.model_type} cannot run over one flat batch of tokens: "
            f"{' '.join(str(error).split())}; choose another model"
        ) from error
    _check_calls(config, layers, calls)
    return dict(zip(layers, calls, strict=True))


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Within it, torch's distributions (of Gemma 3n) do not look at arguments, which have no values on meta."""
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(__debug__)  # torch's default


def decoder_of(model: Any) -> nn.Module:
    """The part of a causal language model that gives the final hidden states: it holds the embedding."""
    return holder_of(model, model.get_input_embeddings())


def holder_of(model: Any, part: nn.Module) -> nn.Module:
    """The module of `model` whose child `part` is."""
    holder: nn.Module = next(module for module in model.modules() if part in module.children())
    return holder


def _attention_layers(config: Any, model: Any) -> list[int]:
    """The layers of a skeleton that have keys and values. ConfigError if others keep what we do not compute."""
    types = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    others = [layer for layer, kind in enumerate(types) if kind not in _LAYER_TYPES]
    if len(others) != len(state_layers(model)):
        kind = types[others[0]] if others else "linear_attention"
        raise ConfigError(
            f"model_type={config.model_type} has layers of type {kind}, which keep a state for each request instead of "
            "keys and values; those of this model are not served yet: choose another"
        )
    # "vision": the tokens of an image attend to each other, those of a text to earlier ones.
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if getattr(config, "is_causal", True) is False or bidirectional not in (None, False, "vision"):
        raise ConfigError(f"model_type={config.model_type} attends to later tokens, so it is no decoder")
    return [layer for layer in range(config.num_hidden_layers) if layer not in others]


def _has_window(config: Any) -> bool:
    """Whether a configuration without types of layers has a sliding window that is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    return bool(window) and window < config.max_position_embeddings and hasattr(type(config), "sliding_window")


def _check_calls(config: Any, layers: list[int], calls: list[AttentionCall]) -> None:
    kind = config.model_type
    if len(calls) != len(layers):
        raise ConfigError(
            f"transformers' modules of model_type={kind} call attention {len(calls)} times in {len(layers)} layers; "
            "served are layers with attention, and once: choose another model"
        )
    if not calls:
        raise ConfigError(
            f"no layer of model_type={kind} attends to earlier tokens: all keep a state for each request instead of "
            "keys and values; served are models with both: choose another"
        )
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(calls) * _has_window(config)
    silent = [
        layer
        for layer, call in zip(layers, calls, strict=True)
        if layer < len(types) and types[layer] == "sliding_attention" and call.window is None
    ]
    if silent:
        raise ConfigError(
            f"layer {silent[0]} of model_type={kind} has a sliding window that its modules do not pass to attention; "
            "choose another model"
        )
    for layer, call in zip(layers, calls, strict=True):
        if call.source is not None and (call.kind != calls[call.source].kind or call.sinks is not None):
            raise ConfigError(
                f"layer {layer} of model_type={kind} reads the KV of layer {layers[call.source]}, but attends in "
                "another way; choose another model"
            )
