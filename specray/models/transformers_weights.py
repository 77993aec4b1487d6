"""Loads a checkpoint into transformers' modules, tensor by tensor.

transformers' own tables say which tensors of a checkpoint become which parameter: names that differ, experts that are
stored one by one. As soon as a module has its weights, it is packed: no more than one module is in memory twice.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from specray.errors import ConfigError, first_of
from specray.layers.parallel import Part, RankGroup
from specray.models.loading import Loader
from specray.models.transformers_layers import (
    FlatAttention,
    FlatGatedUnits,
    FlatLinear,
    as_rms_norm,
    computes_gated_units,
    computes_rotary_attention,
    is_experts,
    pack_experts,
)
from specray.models.transformers_parallel import Split
from specray.models.transformers_skeleton import AttentionCall, decoder_of
from specray.ops.device_ops import groups_experts
from specray.ops.linear import concat
from specray.ops.quantised_weight import QuantisedWeight, joined

# How checkpoints of image models name a language model that is built alone: packages for their encoders are missing.
_LANGUAGE_MODEL = re.compile(r"^model\.language_model\.")
_STACKS = [[(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]]  # of experts [experts, out, in]
_NUMBERED = re.compile(r"\.\d+\.")  # tensors of layers


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How the checkpoint names tensors; None if it has no such tensor, or not as one."""

    embedding: str | None
    output: str | None
    output_bias: str | None


def load_weights(model: Any, loader: Loader, split: Split, calls: Mapping[int, AttentionCall]) -> StoredNames:
    """Fill the skeleton `model`, and replace its linears and experts; not its output matrix, which is left empty.

    `split` says of which this rank has a part, `calls` how its layers attend.

    ConfigError if the checkpoint lacks a tensor.
    """
    _make_buffers(model, loader.device)
    output = _name_of(model, model.get_output_embeddings())
    stored: dict[str, str] = {}
    filling = _Filling(model, loader, {output}, split, calls)
    for name, value in _converted(model, loader, {name: name for name in loader.names()}):
        if isinstance(value, str):
            stored[name] = value
        filling.set(name, value)
    names = StoredNames(*map(stored.get, _vocab_parameters(model)))
    if missing := filling.missing():
        raise _incomplete(loader, type(model).__name__, missing)
    if names.output is None and not model.config.tie_word_embeddings:
        raise ConfigError(
            f"{loader.folder}: tie_word_embeddings=false in config.json, but the checkpoint has no tensor "
            f"{output}.weight; fetch the missing weight file, or set tie_word_embeddings: true if the model shares its "
            "embedding"
        )
    return names


def stored_vocab_names(model: Any, names: Collection[str]) -> StoredNames:
    """How a checkpoint with tensors `names` names the embedding and the output matrix of the skeleton `model`."""
    renamings, converters = _conversions(model)
    state = model.state_dict()
    stored = {
        _renamed(name, renamings, converters, model.base_model_prefix, state)[0]: name
        for name in names
        if not _NUMBERED.search(name)
    }
    return StoredNames(*map(stored.get, _vocab_parameters(model)))


def load_first_layer(model: Any, loader: Loader, prefix: str, tensors: Mapping[str, str], call: AttentionCall) -> None:
    """Fill the only decoder layer of a skeleton, and replace its linears and experts; the rest stays empty.

    The layer's tensors are `prefix`* in the checkpoint: the values of `tensors`, whose keys are the names that they
    would have in one of the target's own layers, behind the layer's number. ConfigError if one is missing.
    """
    _make_buffers(model, loader.device)
    first = f"{_name_of(model, decoder_of(model))}.layers.0."
    outside = {name for name, _ in model.named_modules() if not f"{name}.".startswith(first)}
    filling = _Filling(model, loader, outside, Split({}, set()), {0: call})
    for name, value in _converted(model, loader, {first + part: stored for part, stored in tensors.items()}):
        filling.set(name, value)
    if missing := filling.missing():
        raise _incomplete(loader, "an MTP layer", [name.replace(first, prefix) for name in missing])


def _incomplete(loader: Loader, whole: str, missing: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the checkpoint in {loader.folder} lacks {len(missing)} tensors of {whole}: {first_of(missing)}; the files "
        "are incomplete, or their names are those of another implementation"
    )


def _vocab_parameters(model: Any) -> tuple[str, str, str]:
    """The fields of StoredNames, by their names in `model`."""
    embedding = _name_of(model, model.get_input_embeddings())
    output = _name_of(model, model.get_output_embeddings())
    return f"{embedding}.weight", f"{output}.weight", f"{output}.bias"


def _conversions(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _name_of(model: Any, wanted: nn.Module) -> str:
    names = {module: name for name, module in model.named_modules()}
    found: str = names[wanted]
    return found


def _make_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies, as transformers does."""
    owners: dict[str, Any] = {path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for name, module in model.named_modules():
        for key in [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]:
            delattr(module, key)  # what a pass of the skeleton has kept, such as longrope's other frequencies
        own = {key for key in module._non_persistent_buffers_set if module._buffers[key] is not None}
        for key in own:
            buffer = module._buffers[key]
            filled = torch.full(buffer.shape, torch.nan if buffer.is_floating_point() else -1, dtype=buffer.dtype)
            module._buffers[key] = filled
        if own:
            owner = max((path for path in owners if f"{name}.".startswith(f"{path}." if path else "")), key=len)
            owners[owner]._init_weights(module)  # leaves parameters alone: they are on the meta device
        for key in own:
            if (module._buffers[key] != module._buffers[key]).any():
                raise ConfigError(f"transformers does not compute the buffer {name}.{key} of {type(model).__name__}")
            module._buffers[key] = module._buffers[key].to(device)


def _converted(model: Any, loader: Loader, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(name of a parameter, its value, see `_Filling.set`).

    `names` are the stored tensors, by the names that they have in a checkpoint of this model.
    """
    renamings, converters = _conversions(model)
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    collected: dict[str, WeightConverter] = {}
    sources: dict[str, dict[str, list[str]]] = {}  # stored names by the converters' patterns
    for usual in sorted(names, key=dot_natural_key):
        name, pattern = _renamed(usual, renamings, converters, model.base_model_prefix, state)
        if name not in state:
            continue
        if pattern is None:
            yield name, names[usual]
            continue
        converter = collected.setdefault(name, deepcopy(by_pattern[pattern]))
        read: Any = partial(loader.any_shape, names[usual])  # a call is taken in place of a Future
        converter.add_tensor(name, usual, pattern, read)
        sources.setdefault(name, {}).setdefault(pattern, []).append(names[usual])
    for name, converter in collected.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if is_experts(module) and (experts := _kept_experts(converter, sources[name], loader)) is not None:
            yield name, experts
            continue
        for target, value in converter.convert(name, model=model, config=model.config).items():
            yield target, value[0] if isinstance(value, list) else value


def _kept_experts(
    converter: WeightConverter, sources: Mapping[str, Sequence[str]], loader: Loader
) -> list[QuantisedWeight] | None:
    """Each expert's matrix, where all stay as they are stored and one expert's are only put one below the other."""
    operations: list[Any] = converter.operations
    if [(type(each), getattr(each, "dim", None)) for each in operations] not in _STACKS:
        return None
    names = list(zip(*(sources.get(pattern, ()) for pattern in converter.source_patterns), strict=False))
    if sum(map(len, names)) < sum(map(len, sources.values())):
        return None  # the converter finds what is missing
    experts = [[loader.any_matrix(name) for name in expert] for expert in names]
    kept = [[part for part in expert if part is not None] for expert in experts]
    return [joined(expert) for expert in kept] if kept == experts else None


def _renamed(
    stored: str, renamings: list[Any], converters: list[Any], prefix: str, state: dict[str, Tensor]
) -> tuple[str, str | None]:
    """(the parameter that a stored tensor belongs to, the pattern of its converter)."""
    if stored in state and not any(converter.rename_source_key(stored)[1] for converter in converters):
        return stored, None
    for candidate in (stored, _LANGUAGE_MODEL.sub(f"{prefix}.", stored)):
        name, pattern = rename_source_key(candidate, renamings, converters, prefix, state)
        if name in state:
            return name, pattern
    return stored, None


class _Filling:
    """Puts tensors into a model, and packs each module that is complete."""

    def __init__(
        self, model: Any, loader: Loader, empty: Collection[str], split: Split, calls: Mapping[int, AttentionCall]
    ) -> None:
        """All modules but those of the paths `empty`, which keep no tensor of their own."""
        self._split = split
        self._model = model
        self._loader = loader
        self._empty = empty
        self._missing = {name for name, _ in _own_tensors(model) if name.rpartition(".")[0] not in empty}
        self._float32 = _kept_in_float32(model, loader.dtype)
        self._gated = {path for path, module in model.named_modules() if computes_gated_units(module)}
        self._attention = _rotary_attention(model, calls)
        self._packed: dict[str, dict[str, Any]] = {}  # the weight and bias of each linear, until both are there
        self._experts: dict[str, dict[str, Sequence[QuantisedWeight]]] = {}  # that stay as they are stored

    def set(self, name: str, value: Any) -> None:
        """Parameter or buffer `name`: a tensor, the name of a stored one, or each expert's matrix [out, in]."""
        path, _, key = name.rpartition(".")
        if path in self._empty:
            return
        module = self._model.get_submodule(path)
        if type(module) in (nn.Linear, Conv1D):
            self._packed.setdefault(path, {})[key] = self._linear_part(module, name, value)
        elif (experts := self._experts_of(module, name, value)) is not None:
            self._experts.setdefault(path, {})[key] = experts
        else:
            like = getattr(module, key)
            tensor = self._tensor(name, like, value, self._split.tensors.get(name))
            if key in module._buffers:
                module._buffers[key] = tensor
            else:
                module._parameters[key] = nn.Parameter(tensor, requires_grad=False)
        self._missing.discard(name)
        self._pack(path, module)

    def missing(self) -> list[str]:
        """Tensors that were not set."""
        return sorted(self._missing)

    def _pack(self, path: str, module: nn.Module) -> None:
        if any(f"{path}.{key}" in self._missing for key in (*module._parameters, *module._buffers)):
            return
        options = self._loader.quantization, self._loader.dtype
        parent = path.rpartition(".")[0]
        if parent in self._gated:
            linears = [f"{parent}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
            if all(linear in self._packed for linear in linears):
                gate, up, down = (self._packed.pop(linear)["weight"] for linear in linears)
                group = self._summing_group(linears[2])
                _replace(self._model, parent, FlatGatedUnits(gate, up, down, *options, group))
        elif parent in self._attention and path.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            self._pack_attention(parent, options)
        elif path in self._packed:
            parts = self._packed.pop(path)
            linear = FlatLinear(parts["weight"], parts.get("bias"), *options, self._summing_group(path))
            _replace(self._model, path, linear)
        elif (norm := as_rms_norm(module)) is not None:
            _replace(self._model, path, norm)
        elif is_experts(module):
            group = self._loader.group if path in self._split.experts else RankGroup()
            at_once = groups_experts(self._loader.moe_runner_backend, self._loader.quantization, self._loader.device)
            stored = self._experts.pop(path, {})
            packed: Any = pack_experts(module, stored, self._loader.quantization, group, at_once)
            module.packed_experts = packed

    def _pack_attention(self, path: str, options: tuple[str | None, torch.dtype]) -> None:
        """Replace an attention module once all its linears are there."""
        linears = [f"{path}.{name}_proj" for name in "qkvo"]
        if any(linear not in self._packed for linear in linears) or any(
            f"{linear}.bias" in self._missing for linear in linears
        ):
            return
        *inputs, out = (self._packed.pop(linear) for linear in linears)
        output = FlatLinear(out["weight"], out.get("bias"), *options, self._summing_group(linears[3]))
        norms = (self._model.get_submodule(path)._modules.get(name) for name in ("q_norm", "k_norm"))
        _replace(self._model, path, FlatAttention(inputs, output, self._attention[path], *options, *norms))

    def _summing_group(self, path: str) -> RankGroup | None:
        """The ranks whose results of a linear are added."""
        part = self._split.tensors.get(f"{path}.weight")
        return self._loader.group if part is not None and part.dim == 1 else None

    def _experts_of(self, module: Any, name: str, value: Any) -> Sequence[QuantisedWeight] | None:
        """Each expert's matrix [out, in] as it is stored, if `value` is what stays so."""
        like = getattr(module, name.rpartition(".")[2])
        if isinstance(value, list):
            self._check_shape(name, (len(value), *value[0].shape), tuple(like.shape))
            return value
        if not (isinstance(value, str) and is_experts(module) and module.is_transposed and like.dim() == 3):
            return None
        return self._loader.experts(value, (like.shape[0], like.shape[1], like.shape[2]))

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ConfigError(
                f"{self._loader.folder}: the tensors of {name} have shape {list(shape)}, but config.json implies "
                f"{list(expected)}"
            )

    def _linear_part(self, module: Any, name: str, value: str | Tensor) -> Any:
        part = self._split.tensors.get(name)
        if name.endswith(".bias"):
            return self._tensor(name, module.bias, value, part)
        if isinstance(value, str) and type(module) is nn.Linear and not self._is_kept(name):
            shape, (rows, dim) = _whole(module.weight, part), _rows(part)
            parts = [self._loader.weight(value, (shape[0], shape[1]), each, dim) for each in rows]
            return parts[0] if len(parts) == 1 else concat(*parts)
        tensor = self._tensor(name, module.weight, value, part)
        return tensor.t().contiguous() if isinstance(module, Conv1D) else tensor

    def _is_kept(self, name: str) -> bool:
        """Whether transformers keeps a parameter in float32."""
        return any(part in name for part in self._float32)

    def _tensor(self, name: str, like: Tensor, value: str | Tensor, part: Part | None = None) -> Tensor:
        """A rank's `part` of a tensor, or of the stored one that `value` names; `like` has the result's shape."""
        shape, (rows, dim) = _whole(like, part), _rows(part)
        dtype = like.dtype
        if dtype == self._loader.dtype and self._is_kept(name):
            dtype = torch.float32
        if isinstance(value, str):
            if dtype == self._loader.dtype:
                parts = [self._loader.tensor(value, shape, each, dim) for each in rows]
                return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            value = self._loader.stored(value, shape)
        else:
            self._check_shape(name, tuple(value.shape), shape)
        if part is not None:
            value = torch.cat([value.narrow(dim, each.start, each.stop - each.start) for each in rows], dim)
        return value.to(self._loader.device, dtype)


def _rows(part: Part | None) -> tuple[tuple[slice, ...], int]:
    return ((slice(None),), 0) if part is None else (part.rows, part.dim)


def _whole(like: Tensor, part: Part | None) -> tuple[int, ...]:
    """The shape of a tensor of all ranks, from that of one rank's part."""
    shape = list(like.shape)
    if part is not None:
        shape[part.dim] = part.length
    return tuple(shape)


def _rotary_attention(model: Any, calls: Mapping[int, AttentionCall]) -> dict[str, AttentionCall]:
    """The modules that FlatAttention can replace, by their paths."""
    modules = {
        path: (module, calls[module.layer_idx])
        for path, module in model.named_modules()
        if getattr(module, "layer_idx", None) in calls
    }
    return {path: call for path, (module, call) in modules.items() if computes_rotary_attention(module, call)}


def _own_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that checkpoints have."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield prefix + key, tensor


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Parts of the names of parameters that transformers keeps in float32."""
    strict, loose = set(model._keep_in_fp32_modules_strict or ()), set(model._keep_in_fp32_modules or ())
    if dtype is torch.float32:
        return set()
    return strict | loose if dtype is torch.float16 else strict


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
