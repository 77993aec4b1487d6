"""Which code computes a checkpoint's model: a class of MODELS, or transformers' own modules."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from specray.config import EngineConfig, ModelImpl
from specray.errors import ConfigError, first_of
from specray.layers.parallel import RankGroup, SilentRank
from specray.layers.rotary import has_fixed_length, num_positions
from specray.models.causal_lm import CausalLM
from specray.models.config_keys import check_keys
from specray.models.deepseek import Deepseek
from specray.models.fused import fused_decoder
from specray.models.llama import Llama
from specray.models.llama_config import LlamaConfig
from specray.models.llama_shape import check_heads
from specray.models.loading import EMBEDDING, Loader
from specray.models.moe_models import Mixtral, Qwen3Moe
from specray.models.quantized_formats import checkpoint_format
from specray.models.target_model import ModelShape, TargetModel
from specray.ops.attention import torch_dtype
from specray.ops.device_ops import ops_on
from specray.ops.layer_attention import LayerAttention
from specray.ops.linear import fixed_order, is_row_wise
from specray.ops.quantization import check_quantization

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "MiMoForCausalLM": Llama,
    "MixtralForCausalLM": Mixtral,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "DeepseekV2ForCausalLM": Deepseek,
    "DeepseekV3ForCausalLM": Deepseek,
}
# Language models that transformers has within an image model only, and that model's type.
_WITHIN_IMAGE_MODELS: Mapping[str | None, str] = {"Step3p5ForCausalLM": "step3p7"}
_COMMON_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_SIZES = (*_COMMON_SIZES, "intermediate_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
_STRINGS = ("model_type", "dtype", "torch_dtype")
_BOOLEANS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")  # that are read here
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000

logger = logging.getLogger(__name__)


def load_config(folder: Path, model_impl: ModelImpl = "auto") -> PretrainedConfig:
    """The checkpoint's config.json, that of the language model of an image or audio model.

    ConfigError if nothing computes the model in the way that `model_impl` asks for, see EngineConfig.
    """
    config = _native_config(folder, model_impl) or _transformers_config(folder)
    checkpoint_format(folder)  # refuses unknown ones before any weight is read
    return config


def _native_config(folder: Path, model_impl: ModelImpl) -> PretrainedConfig | None:
    """The configuration of a model of MODELS; None if transformers' modules should compute it."""
    content = _content(folder)
    name = _first_architecture(content)
    if model_impl == "transformers" or (model_impl == "auto" and name not in MODELS and _has_modules(content)):
        return None
    if name is not None or content is None:
        _check_architecture(folder, name)
    config = _read_config(folder, content)
    _check_architecture(folder, next(iter(_architectures(config)), None))
    _check_numbers(folder, config, _SIZES, _OPTIONAL_SIZES)
    _check_heads(folder, config)
    try:
        check_keys(folder / "config.json", config)
    except ConfigError as error:
        if model_impl == "native" or not _has_modules(content):
            raise
        logger.info("transformers' modules compute this model: %s", error)
        return None
    return config


def _transformers_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model that transformers' modules compute."""
    content = _content(folder)
    _check_content(folder / "config.json", content)
    if not _has_modules(content):
        raise _unsupported(folder, _first_architecture(content))
    whole = _auto_config(folder)
    config: Any = whole.get_text_config(decoder=True)
    if (architecture := _first_architecture(content)) in _WITHIN_IMAGE_MODELS:
        from transformers import CONFIG_MAPPING

        make: Any = CONFIG_MAPPING[_WITHIN_IMAGE_MODELS[architecture]]
        config.multimodal_config = make(text_config=config)
    elif config is not whole:
        config.architectures = whole.architectures
        config.dtype = config.dtype or whole.dtype
        # transformers ties what the whole model says, and nothing if it says nothing.
        config.tie_word_embeddings = whole.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
        config.multimodal_config = whole
    config.allow_global_per_layer_attribute_access = True  # layers' own values are read by transformers' modules alone
    check_keys(folder / "config.json", config, honoured={*dir(type(config)), *type(config).attribute_map})
    config.is_native = False
    if not hasattr(config, "num_attention_heads"):
        raise ConfigError(
            f"{folder}: model_type={config.model_type} has no attention: its layers keep a state for each request "
            "instead of keys and values; served are models with both: choose another"
        )
    _check_numbers(folder, config, _COMMON_SIZES, ())
    return cast("PretrainedConfig", config)


def is_native(config: PretrainedConfig) -> bool:
    """Whether a class of MODELS computes the model of a config that `load_config` has read."""
    return bool(getattr(config, "is_native", True))


def expands(config: PretrainedConfig, quantization: str | None) -> Callable[[str], bool]:
    """Whether the model of a config expands a matrix of this name that its checkpoint has quantised."""
    if quantization not in (None, "auto"):
        return lambda name: True  # noqa: ARG005
    suffixes = MODELS[_architectures(config)[0]].expanded if is_native(config) else ()
    return lambda name: name.endswith(suffixes)


def shape_of(config: PretrainedConfig, group: RankGroup) -> ModelShape:
    """Sizes of a model whose config `load_config` has read."""
    if is_native(config):
        return MODELS[_architectures(config)[0]].shape_of(config, group)
    from specray.models.transformers_model import transformers_shape  # imports transformers' models

    return transformers_shape(config, group)


def context_length(config: PretrainedConfig, wanted: int | None) -> int:
    """Longest prompt and output together: `wanted`, or the longest possible. ConfigError if `wanted` is longer.

    YaRN and linear scaling extend the context by their factor. Chunked and sparse attention limit it to the tokens
    within which they are full attention.
    """
    longest, reason = num_positions(config), "that the checkpoint supports"
    keys, dense = _dense_attention(config)
    if dense is not None and dense < longest:
        longest, reason = dense, f"of its {keys}, beyond which SpecRay does not compute such layers yet"
    elif has_fixed_length(config):
        reason = f"for which SpecRay computes rope_type={config.rope_parameters['rope_type']}"
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"context_length={wanted} is more than the {longest} positions {reason}; "
            f"set context_length <= {longest} or leave it out"
        )
    return wanted or longest


def _dense_attention(config: Any) -> tuple[str, int | None]:
    """(the keys of a configuration, the tokens within which they leave chunked or sparse attention full; None: all)."""
    types = getattr(config, "layer_types", None) or ()
    if "indexed_attention" in types:
        return "index_topk", int(config.index_topk)
    if "minimax_m3_sparse" in types:
        return "index_topk_blocks * index_block_size", int(config.index_topk_blocks * config.index_block_size)
    is_chunked = hasattr(type(config), "attention_chunk_size")  # MiMo-V2-Flash is published with it and has windows
    return "attention_chunk_size", config.attention_chunk_size if is_chunked else None


def _layer_attention(config: PretrainedConfig, max_positions: int) -> list[LayerAttention] | None:
    """How the layers of a model of MODELS attend; None if all do to everything."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_positions or not getattr(config, "use_sliding_window", True):
        return None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [LayerAttention(window=window if kind == "sliding_attention" else None) for kind in types]


def vocab_names(folder: Path, loader: Loader, tied: bool) -> tuple[str, str]:
    """The tensors of the embedding and the output matrix in `folder`; see `Loader.output_name`. Reads no weights."""
    config = load_config(folder)
    if is_native(config):
        return EMBEDDING, loader.output_name(tied)
    from specray.models.transformers_skeleton import build_skeleton  # imports transformers' models
    from specray.models.transformers_weights import stored_vocab_names

    names = stored_vocab_names(build_skeleton(config, loader.dtype), loader.names())
    if names.embedding is None:
        raise ConfigError(f"the checkpoint in {folder} has no embedding that a drafter can read; use an inline drafter")
    return names.embedding, names.output or names.embedding


def check_ranks(config: PretrainedConfig, tp_size: int) -> None:
    """ConfigError if the ranks cannot share a model."""
    if not is_native(config):
        if tp_size > 1:
            shape_of(config, SilentRank(tp_size))
        return
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    check_heads(config.num_attention_heads, num_kv_heads, tp_size)


_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def resolve_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The type to compute in. auto: the checkpoint's, or bfloat16 for a float32 checkpoint if the hardware has it."""
    if name != "auto":
        return torch_dtype(name)
    stored = config.dtype or torch.float32
    if stored not in _COMPUTED:
        raise ConfigError(
            f"config.json has dtype={str(stored).removeprefix('torch.')}, in which nothing is computed; set dtype to "
            "float32, bfloat16 or float16"
        )
    if stored is torch.float32 and ops_on(device).has_bfloat16(device):
        return torch.bfloat16
    return stored


def load_model(
    folder: Path,
    config: EngineConfig,
    group: RankGroup,
    device: torch.device,
    progress: bool,
    screens_output: bool = False,
) -> TargetModel:
    """The model with this rank's part of the weights; `screens_output`: see Loader."""
    model_config = load_config(folder, config.model_impl)
    if is_native(model_config):  # else the model splits itself
        check_ranks(model_config, group.size)
    dtype = resolve_dtype(config.dtype, model_config, device)
    check_quantization(config.quantization, device, dtype)
    loader = Loader(
        folder,
        config.load_format,
        dtype,
        device,
        progress and group.leads,
        config.quantization,
        group,
        config.moe_runner_backend,
        screens_output,
    )
    try:
        positions = context_length(model_config, config.context_length)
        model: TargetModel
        with fixed_order(config.deterministic):
            if is_native(model_config):
                model = _load_native(model_config, loader, positions)
            else:
                from specray.models.transformers_model import TransformersModel  # imports transformers' models

                model = TransformersModel(model_config, loader, positions)
        if group.leads:
            _warn_of_unused(loader, model.shape.num_layers, _architectures(model_config)[0])
            _say_what_is_expanded(loader)
        return model
    finally:
        loader.close()


def _load_native(config: PretrainedConfig, loader: Loader, max_positions: int) -> CausalLM:
    model = MODELS[_architectures(config)[0]](config, loader, max_positions)
    layers = list(model.layers)
    model.layer_attention = _layer_attention(config, max_positions)
    model.fuse(fused_decoder(layers, model.rotary, model.shape.eps))
    model.is_row_wise = all(map(is_row_wise, layers))
    return model


def _warn_of_unused(loader: Loader, num_layers: int, architecture: str) -> None:
    """Log tensors that the architecture does not have, other than MTP layers and tables of positions."""
    own = re.compile(r"model\.(embed_tokens|norm|layers\.(?P<layer>\d+))\.(?!.*rotary_emb\.)|lm_head\.")
    unused = [name for name in loader.unused() if (match := own.match(name)) and int(match["layer"] or 0) < num_layers]
    if unused:
        logger.warning(
            "%d tensors of %s are not part of %s and have no effect, as in transformers: %s",
            len(unused),
            loader.folder,
            architecture,
            first_of(unused),
        )


def _say_what_is_expanded(loader: Loader) -> None:
    if names := loader.expanded:
        logger.info(
            "%d quantised matrices of %s are expanded to %s: %s",
            len(names),
            loader.folder,
            str(loader.dtype).removeprefix("torch."),
            first_of(names),
        )


def _content(folder: Path) -> Any:
    """config.json as it is; None if it is not JSON: transformers raises an error that describes the problem."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _first_architecture(content: Any) -> str | None:
    names = content.get("architectures") if isinstance(content, dict) else None
    return str(names[0]) if isinstance(names, list) and names else None


def _has_modules(content: Any) -> bool:
    """Whether transformers itself has this language model, alone or in an image or audio model."""
    from transformers.models.auto.modeling_auto import (  # reads all models' sources, for a second
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    model_type = content.get("model_type") if isinstance(content, dict) else None
    tables = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    known = {table.get(model_type) for table in tables} if isinstance(model_type, str) else set()
    return _plain(_first_architecture(content)) in {_plain(name) for name in known.union(_WITHIN_IMAGE_MODELS)} - {""}


def _plain(architecture: str | None) -> str:
    """Without what published names have otherwise than transformers: KimiK25, Ernie4_5_ForCausalLM, ExaoneMoE."""
    return (architecture or "").replace("_", "").lower()


def _read_config(folder: Path, content: Any) -> PretrainedConfig:
    _check_content(folder / "config.json", content)
    try:
        known = _config_class(content.get("model_type"))
        if known is not None:
            return known.from_dict(content | {"model_type": known.model_type})
    except (TypeError, AttributeError):
        pass  # as in `_content`
    except Exception as error:
        raise _unusable(folder, error) from error
    return _auto_config(folder)


def _auto_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig  # like `_has_modules`

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not wrap its own exceptions
        raise _unusable(folder, error) from error
    return config


def _unusable(folder: Path, error: Exception) -> ConfigError:
    reason, _, _ = " ".join(str(error).split()).partition(". ")  # transformers adds advice to some errors
    return ConfigError(f"{folder / 'config.json'} cannot be used: {reason}; correct it, or fetch it again")


def _check_architecture(folder: Path, name: str | None) -> None:
    if name not in MODELS:
        raise _unsupported(folder, name)


def _unsupported(folder: Path, name: str | None) -> ConfigError:
    return ConfigError(
        f"{folder}: config.json has architectures=[{name or ''}], which is not supported; choose a decoder that the "
        f"installed version of transformers has, or one of {', '.join(MODELS)}"
    )


def _config_class(model_type: object) -> type[PretrainedConfig] | None:
    """The class for a model type that is not read by transformers' own."""
    if model_type == "llama":
        return LlamaConfig
    if model_type == "mimo":  # its class is code in the checkpoint, which is never run, and has the fields of Qwen2's
        from transformers import Qwen2Config  # a quarter of a second

        return Qwen2Config
    if model_type == "kimi_k2":  # likewise, those of DeepSeek-V3's
        from transformers import DeepseekV3Config

        return DeepseekV3Config
    return None


def _check_content(path: Path, content: Any, is_text_model: bool = True) -> None:
    """ConfigError for what transformers would compute for minutes, or refuse without the name of the key."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if str(name).endswith("_layers") and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ConfigError(f"{path}: {name}={value} is more than {MAX_LAYERS} layers; correct it")
        by_part = name == "dtype" and isinstance(value, dict)
        if is_text_model and name in _STRINGS and not by_part and not isinstance(value, str | None):
            raise ConfigError(f"{path}: {name}={value!r} must be a string; correct it")
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            _check_dtype(path, name, value)
        if name in _BOOLEANS and not isinstance(value, bool | None):
            raise ConfigError(f"{path}: {name}={value!r} must be true or false; correct it")
        # Per-layer sizes are lists. The config class computes a size of 0; `_check_numbers` checks the result.
        is_size = is_text_model and name in (*_SIZES, "num_key_value_heads", "head_dim")
        if is_size and value != 0 and not isinstance(value, list | None):
            _check_size(path, name, value)
        if isinstance(value, float) and isnan(value):
            raise ConfigError(f"{path}: {name}={value!r} must be a number; correct it")
        if name in ("text_config", "quantization_config") and not isinstance(value, dict | None):
            raise ConfigError(f"{path}: {name}={value!r} must be an object; correct it")
        if str(name).endswith("_config"):
            _check_content(path, value, is_text_model=name == "text_config")


def _check_dtype(path: Path, name: str, value: str) -> None:
    if not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        raise ConfigError(f"{path}: {name}={value!r} must be a type of torch, such as bfloat16; correct it")


def _check_size(path: Path, name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise ConfigError(f"{path}: {name}={value!r} must be a whole number from 1 to {MAX_SIZE}; correct it")


def _check_numbers(folder: Path, config: PretrainedConfig, sizes: Sequence[str], optional_sizes: Sequence[str]) -> None:
    """ConfigError unless sizes are positive integers and the norms' epsilon is a positive number."""
    for name in (*sizes, *optional_sizes):
        value = getattr(config, name, None)
        if name in sizes or value is not None:
            _check_size(folder / "config.json", name, value)
    eps = getattr(config, "rms_norm_eps", 1e-6)
    if eps is None and not is_native(config):
        return  # a model with other norms
    if not isinstance(eps, int | float) or not 0.0 < eps < 1.0:
        raise ConfigError(f"{folder / 'config.json'}: rms_norm_eps={eps!r} must be between 0 and 1; correct it")


def _check_heads(folder: Path, config: PretrainedConfig) -> None:
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{folder / 'config.json'}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}; correct it"
        )


def _architectures(config: PretrainedConfig) -> list[str]:
    names = config.architectures or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]
