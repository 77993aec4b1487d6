"""config.json as it is published: it is read, and no key that changes the arithmetic passes unseen."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.config_keys import NOT_COMPUTED_BY, REPEATED, WITHOUT_EFFECT
from specray.models.registry import context_length, load_config, shape_of
from tests.support.published_configs import PUBLISHED

# Keys that no class of transformers has by that name: of training, kernels, other files, and drafts; sizes that the
# tensors have, too; and such as the classes read when they are made.
_KNOWN = {
    *("model_type", "architectures", "auto_map", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    "tie_word_embeddings",  # of the whole model
    *("aux_loss_alpha", "ep_size", "seq_aux", "need_fp32_gate", "use_grouped_mm", "mamba_ssm_dtype", "att_impl_type"),
    *(
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "num_mtp_modules",
        "use_mtp",
    ),
    *("mtp_transformer_layers", "enable_lm_head_fp32", "enable_attention_fp32_softmax", "eod_token_id", "max_seq_len"),
    *("swa_num_key_value_heads", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim", "expert_hidden_dim"),
    *("mlp_intermediate_size", "full_attention_interval", "moe_layer_offset", "moe_every_n_layer", "moe_layers_enum"),
    *("yarn_only_types", "use_rope_layers", "partial_rotary_factors", "attention_other_setting", "attn_type_list"),
    *(
        "head_dim",
        "sliding_window_size",
        "rotary_dim",
        "shared_intermediate_size",
        "layernorm_epsilon",
        "first_k_dense_replace",
    ),
}


def load(folder: Path, config: dict[str, Any]) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_served(name: str, tmp_path: Path) -> None:
    published, context = PUBLISHED[name]
    config = load(tmp_path, published)
    shape = shape_of(config, RankGroup())
    text = published.get("text_config", published)
    assert shape.num_layers == text["num_hidden_layers"]
    assert (shape.hidden_size, shape.tied) == (text["hidden_size"], published.get("tie_word_embeddings", False))
    assert context_length(config, None) == context


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_key_is_computed_checked_or_changes_nothing(name: str, tmp_path: Path) -> None:
    published, _ = PUBLISHED[name]
    config = load(tmp_path, published)
    kind, cls = str(config.model_type), type(config)
    checked = NOT_COMPUTED_BY.get(kind, {})
    computed = {field.name for field in fields(cls)} | {*cls.attribute_map, *REPEATED, *WITHOUT_EFFECT.get(kind, ())}
    text = published.get("text_config", published)
    assert not text.keys() - computed - checked.keys() - _KNOWN
    for key in text.keys() & checked.keys() - computed:
        other = {**text, key: not text[key] if isinstance(text[key], bool) else 0.77}
        with pytest.raises(ConfigError, match=key):
            load(tmp_path, {**published, "text_config": other} if "text_config" in published else other)


@pytest.mark.parametrize(("key", "value"), [("hybrid_layer_pattern", [0, 1, 0, 1, 1, 0]), ("moe_layer_freq", [1] * 6)])
def test_a_list_that_disagrees_with_what_is_computed_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    published, _ = PUBLISHED["MiMo-V2-Flash"]
    with pytest.raises(ConfigError, match=f"{key} and .* do not describe the same layers"):
        load(tmp_path, published | {key: value})
