"""Keys of a target's config.json that change a model's arithmetic and that no code here computes.

One table: each key, and the values that leave the arithmetic as it is. Any other value is refused, because the model
would load and write nonsense. A key that this table does not name is computed, as transformers does, or changes
nothing; a test goes through the keys of transformers' classes. Sizes are checked in `specray.models.registry`, kinds of
rotary positions in `specray.layers.rotary`.
"""

from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from specray.errors import ConfigError

_SILU = ("silu", "swish")
# Keys of all model types, and of architectures that other engines serve with the Llama family's code.
NOT_COMPUTED: Mapping[str, tuple[object, ...]] = {
    # activations, biases and norms
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
    "activation_function": _SILU,
    "mlp_bias": (False,),
    "attention_out_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    "clip_qkv": (None,),
    "swiglu_limit": (None,),
    "use_post_norm": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    # scales and caps
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "scale_embedding": (False,),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "lm_head_multiplier": (1,),
    "dim_model_base": (),
    "attn_logit_softcapping": (0,),
    "attn_logit_softcap": (0,),
    "final_logit_softcapping": (0,),
    # attention
    "attention_chunk_size": (0,),
    "alibi": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "num_kv_shared_layers": (0,),
    "attention_sink": (False,),
    "attention_value_scale": (1,),
    # rotary positions
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_scaling_factor": (1,),
    "rope_local_base_freq": (),
    "use_rope": (True,),
    "no_rope_layer_interval": (0,),
    "rope_interleaved": (False,),
    # experts
    "num_zero_experts": (0,),
    "zero_expert_num": (0,),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
}
_NOAUX: Mapping[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
# Keys that only some model types compute, and the values that they do not need to. transformers' modules take the
# published values of theirs for granted.
NOT_COMPUTED_BY: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "llama": {"qk_norm": (False,), "use_qk_norm": (False,), "qk_layernorm": (False,), "num_local_experts": (0, 1)},
    "mistral": {"attention_bias": (False,), "qk_norm": (False,), "use_qk_norm": (False,)},
    "mixtral": {"attention_bias": (False,), "qk_norm": (False,), "use_qk_norm": (False,)},
    "deepseek_v2": {
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),  # transformers ignores it, DeepSeek's own code does not
    },
    "deepseek_v3": {
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        **_NOAUX,
    },
    "deepseek_v32": _NOAUX,
    "dots3_note_text": {
        **_NOAUX,
        "attention_gate_type": ("headwise",),
        "swa_attention_gate_type": ("headwise",),
        "apply_mla_qkv_lora_rescale": (True,),
    },
    "exaone_moe": _NOAUX,
    "glm4_moe_lite": _NOAUX,
    "glm_moe_dsa": _NOAUX,
    "glm_ocr_text": {"attention_bias": (False,)},
    "hy_v3": {
        "qk_norm": (True,),
        "route_norm": (True,),
        "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
    },
    "laguna": {"qkv_bias": (False,), "swa_attention_sink_enabled": (False,), "moe_router_use_sigmoid": (True,)},
    "mimo_v2_flash": {
        **_NOAUX,
        "n_shared_experts": (0,),
        "rope_theta": (5_000_000,),
        "swa_rope_theta": (10_000,),
        "partial_rotary_factor": (0.334,),
        "layernorm_epsilon": (1e-5,),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False,),
    },
    "minimax_m2": {
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
    },
    "minimax_m3_vl_text": {
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_head",),
        "use_gemma_norm": (True,),
        "use_routing_bias": (True,),
    },
    "qwen3_5_text": {"attn_output_gate": (True,), "output_gate_type": _SILU},
    "qwen3_5_moe_text": {"attn_output_gate": (True,), "output_gate_type": _SILU},
    "step3p5": {
        "use_moe": (True,),
        "use_qk_norm": (True,),
        "zero_centered": (True,),
        "use_head_wise_attn_gate": (True,),
        "moe_router_activation": ("sigmoid",),
        "norm_expert_weight": (True,),
        "use_moe_router_bias": (True,),
        "sink": (False,),
    },
}
# Keys of NOT_COMPUTED that published checkpoints of a model type have and that nothing reads.
WITHOUT_EFFECT = {"mimo_v2_flash": {"attention_chunk_size"}}
# Lists with an entry for each layer that repeat another key: its name, and its value where the entry is true.
REPEATED = {
    "hybrid_layer_pattern": ("layer_types", "sliding_attention"),
    "moe_layer_freq": ("mlp_layer_types", "sparse"),
    "is_moe_layer": ("mlp_layer_types", "sparse"),
}
# A model divides by these, or takes a root of them. Those of rotary positions may be given by kind of layer.
_POSITIVE = ("query_pre_attn_scalar", "logits_scaling", "rope_theta", "rope_local_base_freq")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Model types that read the factor although their default configuration has none.
_READ_PARTIAL_ROTARY_FACTOR = {
    *("glm4_moe_lite", "glm4v_text", "glm_image_text", "glm_ocr_text", "mellum", "minimax_m2", "minimax_m3_vl_text"),
    *("qwen4_exp_text", "solar_open", "step3p5"),
}


def check_keys(path: Path, config: PretrainedConfig, honoured: Collection[str] = ()) -> None:
    """ConfigError for the first key of `path` that changes the arithmetic in a way that is not computed.

    `honoured` are the names that the configuration's class has, where transformers' own modules compute the model.
    """
    _check_positive(path, config)
    kind = str(config.model_type)
    unread = {*honoured, *WITHOUT_EFFECT.get(kind, ())}
    common = {name: neutral for name, neutral in NOT_COMPUTED.items() if name not in unread}
    for name, neutral in {**common, **NOT_COMPUTED_BY.get(kind, {})}.items():
        _check(path, name, getattr(config, name, None), neutral)
    for name, (own, value) in REPEATED.items():
        entries, kinds = getattr(config, name, None), getattr(config, own, None)
        if not isinstance(entries, list) or not isinstance(kinds, list):
            continue
        if [*map(bool, entries[: len(kinds)])] != [entry == value for entry in kinds]:
            raise ConfigError(f"{path}: {name} and {own} do not describe the same layers; choose another model")
    if not honoured:
        _check_rotary_and_layers(path, config)
    elif not reads_partial_rotary_factor(config):
        _check(path, "partial_rotary_factor", _rope(config).get("partial_rotary_factor"), (1,))


def _check_positive(path: Path, config: PretrainedConfig) -> None:
    rope = _rope(config)
    for fields in (config.to_dict(), rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        for name in _POSITIVE:
            value = fields.get(name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < inf):
                raise ConfigError(f"{path}: {name}={value!r} must be a number above 0; correct it")


def _check_rotary_and_layers(path: Path, config: Any) -> None:
    """transformers' modules compute these, or `specray.models.transformers_skeleton` refuses them."""
    _check(path, "rope_parameters.partial_rotary_factor", _rope(config).get("partial_rotary_factor"), (1,))
    other = sorted(set(map(str, getattr(config, "layer_types", None) or ())) - _LAYER_TYPES)
    if other:
        raise ConfigError(
            f"{path}: layer_types has {other[0]!r}; served are layers of {' and '.join(sorted(_LAYER_TYPES))}; choose "
            "another model"
        )
    layers = getattr(config, "no_rope_layers", None) or []
    if not isinstance(layers, list):
        raise ConfigError(f"{path}: no_rope_layers={layers!r} must be a list; correct it")
    without_rope = [layer for layer, uses_rope in enumerate(layers) if not uses_rope]
    if without_rope:
        raise ConfigError(
            f"{path}: no_rope_layers takes the rotary positions from layer {without_rope[0]}, which is not supported; "
            "choose another model"
        )


def reads_partial_rotary_factor(config: PretrainedConfig) -> bool:
    """Whether the rotary code of transformers' modules for this configuration's class reads the factor."""
    return config.model_type in _READ_PARTIAL_ROTARY_FACTOR or "partial_rotary_factor" in _rope(type(config)())


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _check(path: Path, name: str, value: object, neutral: tuple[object, ...]) -> None:
    if value is None or value in neutral:
        return
    served = " or ".join(map(repr, neutral)) if neutral else "no value"
    raise ConfigError(
        f"{path}: {name}={value!r} changes what the model computes and is not supported (only {served} is); "
        "choose another model"
    )
