"""config.json of published EAGLE heads, and small heads with these settings.

The sizes of the small heads are those of a toy target, so that only sizes and ids of layers differ from the published
files. Sources: the repositories SafeAILab/EAGLE, sgl-project/SpecForge and vllm-project/speculators, and model cards.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from specray.models.target_model import BEFORE_FINAL_NORM
from tests.support.eagle_toy import Layout, ToyHead, _spelled, _tensors, save_bin, save_safetensors
from tests.support.toy import VOCAB_SIZE

NUM_LAYERS = 8  # of the target of the small heads
IDS = "eagle_aux_hidden_state_layer_ids"

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 24,
    "truncated_vocab_size": 24,
    "max_position_embeddings": 100,
    "sliding_window": 7,
}


@dataclass(frozen=True)
class Published:
    """A head; `small` replaces settings of its config.json beside the sizes."""

    version: int
    num_layers: int  # of its target
    entering: tuple[int, ...]  # the target's layers whose input the head reads, by the code it was written for
    config: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    small_layers: tuple[int, ...] = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)  # as `entering`, of the small head
    layer: str = "layers.0."
    spelling: dict[str, str] = field(default_factory=dict)  # other beginnings of names
    own: tuple[str, ...] = ()
    has_fc_bias: bool = False
    is_bin: bool = False


_LLAMA_8B = {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
_SPECULATORS = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [
        {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    ],
}
_QWEN3_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
}
_GPT_OSS = {
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "vocab_size": 201088,
}
_GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
_MODEL_OPTIMIZER: dict[str, Any] = {  # the template of NVIDIA's Model Optimizer, which exports llama3's positions
    "architectures": ["LlamaForCausalLMEagle3"],
    **_GPT_OSS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "draft_vocab_size": 201088,
    "initializer_range": 0.02,
    "intermediate_size": 17280,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}
_EAGLE1_SPECULATORS = {
    "architectures": ["EagleSpeculator"],
    "fusion_bias": False,
    "layernorms": False,
    "speculators_config": {**_SPECULATORS, "algorithm": "eagle"},
    "speculators_model_type": "eagle",
    "speculators_version": "0.1.0",
    "transformer_layer_architecture": "LlamaDecoderLayer",
    "transformer_layer_config": {
        **{name: _LLAMA_8B[name] for name in _LLAMA_8B if name not in ("draft_vocab_size", "torch_dtype")},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
}
_INDIVISIBLE = {"num_attention_heads": 6, "num_key_value_heads": 2}  # 6 heads of 8 for a hidden size of 32

_SPECULATORS_2026 = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 151936,
    IDS: [2, 18, 33],
    "embed_requires_grad": False,
    "fc_norm": True,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": True,
    "speculators_config": _SPECULATORS,
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        **_QWEN3_LAYER,
        "layer_types": ["sliding_attention"],
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
}
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "sliding_attention"]}

PUBLISHED: dict[str, Published] = {
    "SafeAILab, EAGLE-3 for Llama 3.1 8B": Published(
        3, 32, (2, 16, 29), {"architectures": ["LlamaForCausalLM"], **_LLAMA_8B}, layer="midlayer.", is_bin=True
    ),
    "SafeAILab, EAGLE-1 for Vicuna 7B": Published(
        2,
        32,
        (32,),
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 1,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.28.1",
            "use_cache": True,
            "vocab_size": 32000,
        },
        small_layers=(NUM_LAYERS,),
        own=("embed_tokens.weight",),
        has_fc_bias=True,
        is_bin=True,
    ),
    "SafeAILab, EAGLE-2 for Llama 3 8B": Published(
        2,
        32,
        (32,),
        {
            "architectures": ["LlamaForCausalLM"],
            **{name: value for name, value in _LLAMA_8B.items() if name != "draft_vocab_size"},
            "rope_theta": 500000.0,
            "bias": False,
        },
        small_layers=(NUM_LAYERS,),
        own=("embed_tokens.weight",),
        is_bin=True,
    ),
    # Settings of the target, one layer, and what SafeAILab's code reads beside these.
    "SafeAILab, EAGLE-2 for Qwen2 7B": Published(
        2,
        28,
        (28,),
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "initializer_range": 0.02,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "qkv_bias": True,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        small_layers=(NUM_LAYERS,),
        own=("embed_tokens.weight",),
        has_fc_bias=True,
        is_bin=True,
    ),
    "speculators 0.1, converted from EAGLE-1 for Llama 3.1 8B": Published(
        2,
        32,
        (32,),
        _EAGLE1_SPECULATORS,
        small_layers=(NUM_LAYERS,),
        layer="transformer.",
        spelling={"fc.": "fusion_fc."},
    ),
    "speculators 0.1, HASS for Llama 3.1 8B": Published(
        2,
        32,
        (32,),
        {
            **_EAGLE1_SPECULATORS,
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "fusion_bias": True,
        },
        small_layers=(NUM_LAYERS,),
        layer="transformer.",
        spelling={"fc.": "fusion_fc."},
        own=("lm_head.weight",),
        has_fc_bias=True,
    ),
    "SpecForge, EAGLE-3 for Llama 3.1 8B": Published(
        3,
        32,
        (2, 16, 29),
        {"architectures": ["LlamaForCausalLMEagle3"], **_LLAMA_8B},
        layer="midlayer.",
        own=("embed_tokens.weight",),
    ),
    "SpecForge, EAGLE-3 for gpt-oss 20B": Published(
        3,
        24,
        (2, 12, 22),
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {IDS: [1, 11, 21]},
            **_GPT_OSS,
            "initializer_range": 0.02,
            "intermediate_size": 17280,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.52.3",
            "use_cache": True,
            "draft_vocab_size": 32000,
        },
        small={**_INDIVISIBLE, IDS: [1, 3, 6]},
        small_layers=(2, 4, 7),
        layer="midlayer.",
    ),
    "SpecForge, EAGLE-3.1 for Qwen3 30B": Published(
        3,
        48,
        (2, 24, 45),
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "fc_norm": True,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 2048,
            "max_window_layers": 48,
            "model_type": "llama",
            "norm_output": True,
            "num_attention_heads": 32,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.53.2",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
            "draft_vocab_size": 32000,
        },
        layer="midlayer.",
    ),
    "NVIDIA, EAGLE-3 v3 for gpt-oss 120B": Published(
        3,
        36,
        (24, 30, BEFORE_FINAL_NORM),
        _MODEL_OPTIMIZER
        | {
            IDS: [24, 30, 36],  # at both levels, and by the code that they are for, layers whose input is read
            "norm_before_fc": True,
            "layer_types": ["sliding_attention"],
            "sliding_window": 128,
            "target_layer_count": 36,
            "rope_theta": 150000,
            "rope_scaling": _GPT_OSS_YARN,
            "eagle_config": _MODEL_OPTIMIZER["eagle_config"] | {IDS: [24, 30, 36], "norm_before_fc": True},
        },
        small={**_INDIVISIBLE, IDS: [2, 4, 6], "draft_vocab_size": VOCAB_SIZE},
        small_layers=(2, 4, 6),
        layer="midlayer.",
    ),
    "NVIDIA, EAGLE-3 for long contexts of gpt-oss 120B": Published(
        3,
        36,
        (2, 18, 33),
        _MODEL_OPTIMIZER | {"eagle_config": _MODEL_OPTIMIZER["eagle_config"] | {IDS: [1, 17, 32]}},
        small={**_INDIVISIBLE, IDS: [1, 3, 4], "draft_vocab_size": VOCAB_SIZE},
        layer="midlayer.",
    ),
    "NVIDIA, EAGLE-3 for short contexts of gpt-oss 120B": Published(
        3,
        36,
        (36,),
        _MODEL_OPTIMIZER | {"eagle_config": _MODEL_OPTIMIZER["eagle_config"] | {"use_aux_hidden_state": False}},
        small={**_INDIVISIBLE, IDS: [NUM_LAYERS], "draft_vocab_size": VOCAB_SIZE},
        small_layers=(NUM_LAYERS,),
        layer="midlayer.",
    ),
    "nebius, EAGLE-3 for gpt-oss 20B": Published(
        3,
        24,
        (2, 12, 21),
        {
            "architectures": ["LlamaForCausalLM"],
            **_GPT_OSS,
            "intermediate_size": 11520,
            "rope_theta": 150000,
            "rope_scaling": _GPT_OSS_YARN,
            "truncated_vocab_size": 64000,
            "draft_vocab_size": 64000,
        },
        small=_INDIVISIBLE,
        layer="midlayer.",
    ),
    "speculators 0.2, EAGLE-3 for Qwen3 8B": Published(
        3,
        36,
        (2, 18, 33),
        {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "draft_vocab_size": 32000,
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "speculators_config": _SPECULATORS,
            "speculators_model_type": "eagle3",
            "speculators_version": "0.2.0.dev11",
            "target_hidden_size": None,
            "torch_dtype": "bfloat16",
            "transformer_layer_config": {
                **_QWEN3_LAYER,
                "model_type": "llama",
                "mlp_bias": False,
                "pretraining_tp": 1,
                "rope_scaling": None,
                "rope_theta": 1000000.0,
                "use_cache": True,
            },
        },
        own=("embed_tokens.weight",),
    ),
    "speculators, converted from EAGLE-3 for Qwen3 235B": Published(
        3,
        94,
        (2, 47, 91),
        {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": 32000,
            IDS: [1, 46, 90],
            "norm_before_residual": False,
            "speculators_config": _SPECULATORS,
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1.0.dev42",
            "target_hidden_size": None,
            "transformer_layer_config": {
                **_QWEN3_LAYER,
                "intermediate_size": 24576,
                "model_type": "llama",
                "num_attention_heads": 64,
                "num_key_value_heads": 4,
                "rope_scaling": None,
                "rope_theta": 1000000.0,
            },
        },
        small={IDS: [1, 3, 4]},
    ),
    "speculators 0.5, EAGLE-3 for gpt-oss 20B": Published(
        3,
        24,
        (2, 12, 21),
        {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": 64000,
            IDS: None,
            "embed_requires_grad": True,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "speculators_config": _SPECULATORS,
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**_GPT_OSS, "intermediate_size": 2880, "rope_theta": 10000.0},
        },
        small=_INDIVISIBLE,
        own=("embed_tokens.weight",),
    ),
    "speculators 0.6, EAGLE-3 for Qwen3 8B": Published(
        3,
        36,
        (2, 18, 33),
        _SPECULATORS_2026,
        small={"draft_vocab_size": VOCAB_SIZE, IDS: [2, 4, 5]},
    ),
    "speculators 0.6, EAGLE-3 with two layers": Published(
        3,
        36,
        (2, 18, 33),
        _SPECULATORS_2026,
        small={"draft_vocab_size": VOCAB_SIZE, IDS: [2, 4, 5], **_TWO_LAYERS},
    ),
}


def small_head(name: str, seed: int = 0) -> ToyHead:
    """A head with the settings of `name` for a toy target of NUM_LAYERS layers, with random weights."""
    published = PUBLISHED[name]
    config = _shrunk(published.config, _SMALL | published.small)
    parts = [config.get("transformer_layer_config", {}), config.get("eagle_config", {}), config]
    flat = {key: value for part in parts for key, value in part.items() if value is not None}
    defaults = {"head_dim": 8, "num_key_value_heads": flat["num_attention_heads"], IDS: [0, 0, 0]}
    settings: dict[str, Any] = {"rope_theta": 1e4, **defaults, **flat, "bias": published.has_fc_bias}
    settings |= flat.get("rope_parameters", {})
    if settings.get("qkv_bias"):
        settings["attention_bias"] = True
    layout = Layout(
        published.version,
        layer=published.layer,
        spelling=published.spelling,
        own=published.own,
        save=save_bin if published.is_bin else save_safetensors,
    )
    tensors = _tensors(layout, settings, torch.Generator().manual_seed(seed))
    if settings["model_type"] == "qwen3":
        layers = ("layer", "layer1")[: settings["num_hidden_layers"]]
        tensors |= {f"{n}.self_attn.{part}_norm.weight": torch.linspace(0.5, 2, 8) for part in "qk" for n in layers}
    if settings.get("use_aux_hidden_state") is False:
        del tensors["fc.weight"]
    if settings.get("qkv_bias"):
        del tensors["layer.self_attn.o_proj.bias"]
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    return ToyHead(layout, settings, weights, {_spelled(n, layout): t for n, t in tensors.items()}, config)


def _shrunk(config: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """`config` with the values of `small` for settings that it has."""
    return {
        key: _shrunk(value, small) if isinstance(value, dict) else small.get(key, value) if value is not None else None
        for key, value in config.items()
    }
