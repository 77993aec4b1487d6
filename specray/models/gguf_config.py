"""config.json of a GGUF file: llama.cpp's metadata as the fields of transformers' configuration classes.

A key that changes the arithmetic either becomes a field of the class, or has the value that the class computes without
a field; any other is refused. What no key says comes from `gguf_architectures`, from the tensors that are there, or is
the class's default.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from specray.models.gguf_architectures import SOFTMAX, Architecture, architecture_of
from specray.models.gguf_reader import GgufFile, unusable
from specray.models.gguf_rope import rope_parameters

# Keys below the architecture's name, and the fields that they may be. A class has one of each at most, but for experts:
# the width of a dense layer is the first if both are there.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
}
# Values of keys that change nothing where the class has no field for them; so do zero, false and none.
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True,
    "embedding_scale": 1.0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
}
# Keys that other functions here read, and such as say nothing that the tensors do not.
_READ = {"block_count", "nextn_predict_layers", "leading_dense_block_count", "attention.sliding_window_pattern"}
_READ |= {"attention.key_length_mla", "attention.value_length_mla", "attention.temperature_scale"}
_REDUNDANT = {"vocab_size", "pooling_type", "tensor_data_layout"}
_SHAPES = {"expert_feed_forward_length", "expert_shared_feed_forward_length"}  # without a field the class derives them
# Fields that say whether layers have some tensors.
_PRESENT: Mapping[str, str] = {
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "use_qkv_bias": "attn_q.bias",
    "use_bias": "attn_q.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "qk_layernorm": "attn_q_norm.weight",
}


def num_layers(file: GgufFile) -> int:
    """Layers of the decoder, without the MTP layers after them."""
    name = architecture_of(file)[0]
    count: int = file.need(f"{name}.block_count", int) - (file.get(f"{name}.nextn_predict_layers", int) or 0)
    if not 0 < count <= len(file.tensors):
        raise unusable(file.path, f"it has {len(file.tensors)} tensors for {count} layers")
    return count


def model_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, but for the ids of tokens. ConfigError for what is not computed."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, architecture = architecture_of(file)
    model_type = architecture.model_type
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)}
    if "token_embd.weight" not in file.tensors:
        raise unusable(file.path, "it has no tensor token_embd.weight; a part of a model cannot be used")
    config = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": file.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,  # llama.cpp stores it only when it differs
        "pad_token_id": None,  # some classes have one that is outside of smaller vocabularies
        next(field for field in ("num_hidden_layers", "n_layer") if field in known): num_layers(file),
        **architecture.fields,
        **{field: f"blk.0.{tensor}" in file.tensors for field, tensor in _PRESENT.items() if field in known},
        **_from_keys(file, name, architecture, known),
    }
    _check_required(file, name, known, config)
    config |= _heads(file, name, config, known) | _mixtures(file, known) | _windows(file, name, known, config)
    config |= _of_model_type(file, name, config)
    if "rope_parameters" in known:
        config["rope_parameters"] = rope_parameters(file, name, config_class().rope_parameters or {}, config)
    return config


def _check_required(file: GgufFile, name: str, known: set[str], config: Mapping[str, Any]) -> None:
    """ConfigError if the file does not say what no class has a default for that fits another model."""
    for key in ("context_length", "embedding_length", "attention.head_count"):
        file.need(f"{name}.{key}", int)
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "expert_used_count"):
        field = next((field for field in _FIELDS[key] if field in known), None)
        if field is not None and field not in config:
            raise unusable(file.path, f"it has no {name}.{key}")


def _from_keys(file: GgufFile, name: str, architecture: Architecture, known: set[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in file.metadata.items():
        key = key.removeprefix(f"{name}.") if key.startswith(f"{name}.") else ""
        if not key or key in _READ | _REDUNDANT or key.startswith("rope."):
            continue
        field = next((field for field in _FIELDS.get(key, ()) if field in known), None)
        if field is None:
            is_latent = "kv_lora_rank" in known and key in ("attention.key_length", "attention.value_length")
            if not is_latent and key not in _SHAPES:
                _check_neutral(file, name, key, value, architecture)
        elif isinstance(value, bool | int | float):
            config[field] = (value or None) if key == "attention.sliding_window" else _decimal(value)
        else:
            raise unusable(file.path, f"{name}.{key} is not one number for all layers, which is not supported")
    return config


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that is the same float32: what the model's authors wrote."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_neutral(file: GgufFile, name: str, key: str, value: Any, architecture: Architecture) -> None:
    """ConfigError for a key without a field, unless its value changes nothing."""
    head_dim = _head_dim(file, name)
    own = {"attention.key_length": head_dim, "attention.value_length": head_dim, "attention.scale": head_dim**-0.5}
    neutral = {"expert_gating_func": SOFTMAX, **_NEUTRAL, **own, **architecture.expected}.get(key)
    is_same = value == neutral or (
        isinstance(value, float) and neutral is not None and math.isclose(value, neutral, rel_tol=1e-5)
    )
    if is_same or value is None or (value == 0 and neutral is not True):
        return
    served = "" if neutral is None else f" (only {neutral!r} is)"
    raise unusable(file.path, f"{name}.{key}={value!r} is not supported{served}")


def _head_dim(file: GgufFile, name: str) -> int:
    default = file.need(f"{name}.embedding_length", int) // file.need(f"{name}.attention.head_count", int)
    size: int = file.need(f"{name}.attention.key_length", int, default)
    return size


def _heads(file: GgufFile, name: str, config: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Sizes of heads. Latent attention is stored as if it had one KV head."""
    if "kv_lora_rank" not in known:
        heads = config.get("num_attention_heads")
        defaults = {"num_key_value_heads": heads, "head_dim": _head_dim(file, name)}
        return {field: value for field, value in defaults.items() if field in known and field not in config}
    rotated = file.need(f"{name}.rope.dimension_count", int)
    keys, values = f"{name}.attention.key_length", f"{name}.attention.value_length"
    width = file.get(f"{keys}_mla", int) or file.need(keys, int)  # files from before 2025 have the whole heads
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": file.get(f"{values}_mla", int) or file.need(values, int),
        "q_lora_rank": config.get("q_lora_rank"),
    }


def _mixtures(file: GgufFile, known: set[str]) -> dict[str, Any]:
    """Which layers are mixtures of experts: those with a router, which has a row for each expert."""
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers(file))]
    sparse = [router in file.tensors for router in routers]
    key = f"{architecture_of(file)[0]}.expert_count"
    rows = {file.shape(router)[0] for router in routers if router in file.tensors}
    if (rows or {0}) != {count := file.get(key, int) or 0}:
        raise unusable(file.path, f"{key}={count}, but its routers have {sorted(rows)} rows")
    if not any(sparse):
        return {}
    found = {
        "first_k_dense_replace": sparse.index(True),
        "moe_layer_start_index": sparse.index(True),
        "mlp_only_layers": [layer for layer, is_sparse in enumerate(sparse) if not is_sparse],
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "moe_layers": [layer for layer, is_sparse in enumerate(sparse) if is_sparse],
    }
    return {field: value for field, value in found.items() if field in known}


def _windows(file: GgufFile, name: str, known: set[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a sliding window, if the file says so; the class's own pattern is the same as llama.cpp's."""
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if not pattern or "layer_types" not in known or not config.get("sliding_window"):
        return {}
    layers = range(num_layers(file))
    slides = (
        [bool(slid) for slid in pattern] if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in layers]
    )
    if len(slides) < len(layers):
        raise unusable(file.path, f"its pattern of windows has {len(slides)} layers instead of {len(layers)}")
    return {"layer_types": ["sliding_attention" if slides[layer] else "full_attention" for layer in layers]}


def _of_model_type(file: GgufFile, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that llama.cpp's code derives from others."""
    match config["model_type"]:
        case "gemma2" | "gemma3_text":  # of Gemma 2 27B (46 layers) and Gemma 3 27B (62)
            by_width = config["hidden_size"] // config["num_attention_heads"]
            return {"query_pre_attn_scalar": by_width if num_layers(file) in (46, 62) else config["head_dim"]}
        case "deepseek_v2":
            is_grouped = config.get("n_group", 1) > 1
            return {"topk_method": "group_limited_greedy" if is_grouped else "greedy"}
        case "smollm3":
            return {"no_rope_layer_interval": 4}
        case "llama4_text":  # Maverick has no norm of queries and keys
            return {"no_rope_layer_interval": 4, "use_qk_norm": config.get("num_local_experts") != 128}
        case "phi3":
            original = file.get(f"{name}.rope.scaling.original_context_length", int)
            return {} if original is None else {"original_max_position_embeddings": original}
    return {}
