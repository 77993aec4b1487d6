"""Each key of the configuration of a decoder that transformers' modules compute has its effect.

All keys of a configuration are changed at once, and the logits are those of transformers' own attention, or the model
is refused.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.registry import load_model
from specray.models.target_model import TargetModel
from tests.support.decoders import (
    IMAGE_MODELS,
    QUICK,
    SERVED,
    decoder_config,
    logits_in_chunks,
    logits_of,
    random_decoder,
    write_decoder,
)

TOKENS = [0, *(7 * place % 64 for place in range(30))]
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
# Sizes of tensors, or such as choose which tensors there are: those of another size do not fit.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "n_positions"),
    *("num_local_experts", "vocab_size_per_layer_input", "hidden_size_per_layer_input", "altup_num_inputs"),
    *("laurel_rank", "n_shared_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    *("v_head_dim", "qk_nope_head_dim", "shared_intermediate_size", "moe_num_experts", "moe_num_shared_experts"),
    *("num_shared_experts", "intermediate_size_mlp", "n_embd", "n_layer", "n_head", "ffn_dim", "word_embed_proj_dim"),
    *("gated_norm_rank", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "n_inner"),
    *("linear_num_key_heads", "linear_num_value_heads", "conv_L_cache", "block_multiple_of", "index_head_dim"),
    *("index_n_heads", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "num_attention_heads_per_layer"),
    *(
        "prefix_dense_intermediate_size",
        "shared_experts_intermediate_size",
        "dense_intermediate_size",
        "share_expert_dim",
        "num_sliding_attention_heads",
        "max_position_embeddings",
        "original_max_position_embeddings",
    ),
}
# Of training, generation and classification, of kernels, and such as follow from others.
_HARMLESS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id", "use_cache", "is_decoder"),
    *("initializer_range", "embedding_initializer_range", "init_std", "attention_dropout", "resid_pdrop", "embd_pdrop"),
    *("residual_dropout", "embedding_dropout", "hidden_dropout", "classifier_dropout", "attn_pdrop", "dropout"),
    *("layerdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "input_jitter_noise"),
    *("summary_first_dropout", "summary_type", "summary_activation", "summary_use_proj", "summary_proj_to_labels"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "pretraining_tp", "add_cross_attention"),
    *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn"),
    *("enable_moe_fp32_combine", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "rope_scaling"),
    "rope_theta",  # in rope_parameters
}
# Lists and names of layers, which the table of decoders varies, and keys that limit the context or are refused.
_ELSEWHERE = {
    *("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers", "indexer_types", "full_attn_idxs"),
    *("activation_sparsity_pattern", "sliding_window_pattern", "global_attn_every_n_layers", "num_kv_shared_layers"),
    *("prefix_dense_sliding_window_pattern", "attention_chunk_size", "index_topk", "use_bidirectional_attention"),
    *("moe_layer_end_index", "moe_layer_interval", "altup_active_idx", "topk_method", "expert_selection_fn"),
    *("shared_expert_combination_strategy", "enable_moe_block", "attention_k_eq_v", "max_window_layers"),
    *("use_sliding_window", "moe_apply_router_weight_on_input", "layer_rope_theta", "swiglu_limits"),
    *("swiglu_limits_shared", "index_block_size", "index_topk_blocks", "index_local_blocks"),
}
_OTHER: dict[str, Any] = {
    "rotary_dim": 8,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "sliding_window": 9,
    "num_experts_per_tok": 3,
    "top_k_experts": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "num_dense_layers": 0,
    "query_pre_attn_scalar": 7,
    "no_rope_layer_interval": 3,
    "interleave_moe_layer_step": 2,
    "floor_scale": 4,
    "scale_emb": 3,
    "dim_model_base": 16,
    "clip_qkv": 0.5,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "rms_norm_eps": 0.3,
}
# Changes that are refused, and the reason for the first.
_REFUSED = {
    "phimoe": ("sliding_window", "has a sliding window that its modules do not pass to attention"),
    "deepseek_v2": ("attention_bias", "norm_topk_prob", "attention_bias=True changes what"),
    "deepseek_v3": ("attention_bias", "attention_bias=True changes what"),
    "kimi_k25": ("attention_bias", "attention_bias=True changes what"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5-image", "olmo_hybrid"),
        ("hidden_act", "computed with silu only"),
    ),
}


def changes_of(whole: PretrainedConfig) -> dict[str, Any]:
    """Another value for every key that changes the arithmetic of a configuration, of an image model's language model.

    Whether its embedding is the output matrix is a key of the whole.
    """
    config: Any = whole.get_text_config(decoder=True)
    common = {field.name for field in fields(PretrainedConfig)}
    if config is whole:
        common -= {"tie_word_embeddings"}
    else:
        common |= {"tie_word_embeddings"}
    unchanged = common | _SIZES | _HARMLESS | _ELSEWHERE
    values = {field.name: config.__dict__.get(field.name) for field in fields(type(config))}
    return {key: _other(key, value) for key, value in values.items() if key not in unchanged}


def _other(key: str, value: Any) -> Any:
    if key in _OTHER:
        return _OTHER[key]
    if key in _ACTIVATIONS:
        return "silu" if value == "relu" else "relu"
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return 1.5 * value + 0.1
    assert key == "rope_parameters", f"say in this file what changes {key}={value!r}"
    if any(isinstance(part, dict) for part in value.values()):
        return {kind: part and {**part, "rope_theta": 77.0} for kind, part in value.items()}
    return {**value, "rope_theta": 77.0}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SERVED | IMAGE_MODELS]
)
def test_all_keys_of_a_configuration_have_their_effect(name: str, tmp_path: Path) -> None:
    changes = changes_of(decoder_config(name))
    if name in _REFUSED:
        *keys, reason = _REFUSED[name]
        write_decoder(name, tmp_path, **changes)
        with pytest.raises(ConfigError, match=reason):
            load(tmp_path)
        changes = {key: value for key, value in changes.items() if key not in keys}
    unchanged = logits_of(random_decoder(name), TOKENS)
    expected = logits_of(write_decoder(name, tmp_path, **changes), TOKENS)
    assert expected.std() > 0.3
    assert not torch.allclose(expected, unchanged, atol=0.1)
    torch.testing.assert_close(logits_in_chunks(load(tmp_path), TOKENS, 7), expected, atol=2e-4, rtol=0.0)


def load(folder: Path) -> TargetModel:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", model_impl="transformers")
    return load_model(folder, config, RankGroup(), torch.device("cpu"), progress=False)


def test_each_key_of_every_decoders_configuration_is_known() -> None:
    """`changes_of` names one that it does not know."""
    changed = {key for name in SERVED | IMAGE_MODELS for key in changes_of(decoder_config(name))}
    assert _OTHER.keys() <= changed
