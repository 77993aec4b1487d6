"""The supported architectures and their classes."""

import json
import logging
import re
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from specray.config import EngineConfig
from specray.errors import ConfigError, first_of
from specray.layers.parallel import RankGroup
from specray.layers.rotary import has_fixed_length, num_positions
from specray.models.causal_lm import CausalLM
from specray.models.config_keys import check_keys
from specray.models.deepseek import Deepseek
from specray.models.fused import are_row_wise, embed_and_head, fused_decoder
from specray.models.fused_forward import FusedForward
from specray.models.llama import Llama
from specray.models.llama_config import LlamaConfig
from specray.models.loading import Loader
from specray.models.moe_models import Mixtral, Qwen3Moe
from specray.models.quantized_formats import checkpoint_format
from specray.models.target_model import ModelShape
from specray.ops.attention import torch_dtype
from specray.ops.cpu.library import kernels
from specray.ops.linear import fixed_order
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
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000

logger = logging.getLogger(__name__)


def load_config(folder: Path) -> PretrainedConfig:
    """The checkpoint's config.json. ConfigError if the architecture is not supported."""
    config = _read_config(folder)
    _check_architecture(folder, next(iter(_architectures(config)), None))
    _check_numbers(folder, config)
    check_keys(folder / "config.json", config)
    checkpoint_format(folder)  # refuses unknown ones before any weight is read
    return config


def shape_of(config: PretrainedConfig, group: RankGroup) -> ModelShape:
    """Sizes of a model whose config `load_config` has read."""
    return MODELS[_architectures(config)[0]].shape_of(config, group)


def context_length(config: PretrainedConfig, wanted: int | None) -> int:
    """Longest prompt and output together: `wanted`, or the longest possible. ConfigError if `wanted` is longer.

    YaRN and linear scaling extend the context by their factor. A sliding window limits it: within the window,
    attention is full and the output exact.
    """
    longest, reason = num_positions(config), "that the checkpoint supports"
    window = _window(config)
    if window is not None and window < longest:
        longest, reason = window, "of its sliding window, beyond which SpecRay does not compute such layers yet"
    elif has_fixed_length(config):
        reason = f"for which SpecRay computes rope_type={config.rope_parameters['rope_type']}"
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"context_length={wanted} is more than the {longest} positions {reason}; "
            f"set context_length <= {longest} or leave it out"
        )
    return wanted or longest


def _window(config: PretrainedConfig) -> int | None:
    """Positions that a layer with a sliding window attends to; None if there is no such layer."""
    layers = getattr(config, "layer_types", None)
    is_used = getattr(config, "use_sliding_window", True) and (not layers or "sliding_attention" in layers)
    window: int | None = getattr(config, "sliding_window", None)
    return window if is_used else None


def check_ranks(config: PretrainedConfig, tp_size: int) -> None:
    """ConfigError if a model has fewer KV heads than there are ranks."""
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if tp_size > num_kv_heads:
        raise ConfigError(f"tp_size={tp_size} is more than the model's {num_kv_heads} KV heads; lower tp_size")


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
    if stored is torch.float32 and _has_bfloat16(device):
        return torch.bfloat16
    return stored


def load_model(
    folder: Path,
    config: EngineConfig,
    group: RankGroup,
    device: torch.device,
    progress: bool,
    screens_output: bool = False,
) -> CausalLM:
    """The model with this rank's part of the weights; `screens_output`: see Loader."""
    model_config = load_config(folder)
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
        with fixed_order(config.deterministic):
            model = MODELS[_architectures(model_config)[0]](model_config, loader, positions)
        if group.leads:
            _warn_of_unread(loader, model.shape.num_layers, _architectures(model_config)[0])
        layers = list(model.layers)
        model.fused, model.is_row_wise = fused_decoder(layers, model.rotary, model.shape.eps), are_row_wise(layers)
        around = embed_and_head(model.embedding, model.norm, model.head, model.shape.vocab_size)
        if model.fused is not None and around is not None:
            model.fused_forward = FusedForward(model.fused, around, model.embedding.weight.dtype)
        return model
    finally:
        loader.close()


def _warn_of_unread(loader: Loader, num_layers: int, architecture: str) -> None:
    """Log tensors that the architecture does not have, other than MTP layers and tables of positions."""
    own = re.compile(r"model\.(embed_tokens|norm|layers\.(?P<layer>\d+))\.(?!.*rotary_emb\.)|lm_head\.")
    unread = [name for name in loader.unread() if (match := own.match(name)) and int(match["layer"] or 0) < num_layers]
    if unread:
        logger.warning(
            "%d tensors of %s are not part of %s and have no effect, as in transformers: %s",
            len(unread),
            loader.folder,
            architecture,
            first_of(unread),
        )


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        known = _config_class(content.get("model_type"))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        content, known = None, None  # transformers raises an error that describes the problem
    _check_layers(folder, content)
    names = content.get("architectures") if isinstance(content, dict) else None
    if isinstance(names, list) and names:
        _check_architecture(folder, str(names[0]))  # first: transformers may not know the model type either
    try:
        if known is not None:
            return known.from_dict(content)
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not wrap its own exceptions
        raise ConfigError(
            f"{folder / 'config.json'} cannot be used: {' '.join(str(error).split())}; fetch it again"
        ) from error
    return config


def _check_architecture(folder: Path, name: str | None) -> None:
    if name not in MODELS:
        raise ConfigError(
            f"{folder}: config.json has architectures=[{name or ''}], which is not supported; choose a model of one of "
            f"{', '.join(MODELS)}"
        )


def _config_class(model_type: object) -> type[PretrainedConfig] | None:
    """The class for a model type that is not read by transformers' own."""
    if model_type == "llama":
        return LlamaConfig
    if model_type == "mimo":  # its class is code in the checkpoint, which is never run, and has the fields of Qwen2's
        from transformers import Qwen2Config  # a quarter of a second

        return Qwen2Config
    return None


def _check_layers(folder: Path, content: object) -> None:
    """ConfigError for more layers than any model has: transformers would build a list of them for minutes."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if str(name).endswith("_layers") and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ConfigError(
                f"{folder / 'config.json'}: {name}={value} is more than {MAX_LAYERS} layers; fetch it again"
            )


def _check_numbers(folder: Path, config: PretrainedConfig) -> None:
    """ConfigError unless sizes are positive integers and the norms' epsilon is a positive number."""
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = getattr(config, name, None)
        if (name in _SIZES or value is not None) and (type(value) is not int or not 1 <= value <= MAX_SIZE):
            raise ConfigError(f"{folder / 'config.json'}: {name}={value!r} must be a whole number from 1; correct it")
    eps = getattr(config, "rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or not 0.0 < eps < 1.0:
        raise ConfigError(f"{folder / 'config.json'}: rms_norm_eps={eps!r} must be between 0 and 1; correct it")
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{folder / 'config.json'}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}; correct it"
        )


def _architectures(config: PretrainedConfig) -> list[str]:
    names = config.architectures or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if kernels() is not None:
        return True
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
