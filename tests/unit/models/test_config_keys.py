"""Each key of config.json is computed as transformers does, changes nothing, or is refused with its name."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.config_keys import NOT_COMPUTED, NOT_COMPUTED_BY, reads_partial_rotary_factor
from specray.models.registry import context_length, is_native, load_config, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.transformers_skeleton import build_skeleton, decoder_of
from specray.sampling_params import SamplingParams
from tests.support.architectures import SMALL_SIZES, spread
from tests.support.decoders import decoder_config
from tests.support.engine import generate
from tests.support.toy import CONTEXT, toy_tokenizer
from tests.unit.models.test_architectures import TOKENS, change_config, load, logits

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 6, "head_dim": 8}
_CLASSES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "head_dim": 8}),
    "qwen3_moe": (Qwen3MoeConfig, _MOE),
    "deepseek_v2": (DeepseekV2Config, _LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": (DeepseekV3Config, _LATENT),
}
# Keys of training, of generation, of other libraries, and those that follow from others.
_HARMLESS = {
    *("initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "pad_token_id", "bos_token_id", "eos_token_id", "qk_head_dim"),
    "num_nextn_predict_layers",  # the checkpoint's tensors say it
}
# Keys that are computed, and another value of each.
_COMPUTED: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 40,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8,
        "beta_slow": 2,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "attention_bias": True,
    "head_dim": 12,
    "sliding_window": 64,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "greedy",
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "routed_scaling_factor": 2.5,
    "rope_interleave": False,
}
_ADJUSTED = {  # further keys that a value needs
    "use_sliding_window": {"sliding_window": 64, "max_window_layers": 1},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
    "layer_types": {"sliding_window": 64, "use_sliding_window": True},
    "max_window_layers": {"sliding_window": 64, "use_sliding_window": True},
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}  # latent attention has no groups of heads
_OF_LATENT_ATTENTION = dict.fromkeys(_HEADS, _HEADS)


def keys() -> list[tuple[str, str]]:
    common = set(vars(PretrainedConfig()))
    return [(kind, key) for kind, (make, _) in _CLASSES.items() for key in vars(make()) if key not in common]


def write(kind: str, folder: Path, **changes: Any) -> torch.Tensor:
    """A random model of transformers; its logits."""
    make, options = _CLASSES[kind]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(make(**SMALL_SIZES | options | changes)).float().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in key:
            spread(key, tensor)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    with torch.inference_mode():
        expected: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return expected


@pytest.mark.parametrize(("kind", "key"), keys())
def test_each_key_of_a_config_class_is_computed_or_refused_or_changes_nothing(
    kind: str, key: str, tmp_path: Path
) -> None:
    is_latent = kind.startswith("deepseek")
    if key in _HARMLESS or (is_latent and key == "head_dim"):  # qk_rope_head_dim, whatever it says
        return
    if key in _COMPUTED:
        changes = (
            {key: _COMPUTED[key]} | _ADJUSTED.get(key, {}) | (_OF_LATENT_ATTENTION.get(key, {}) if is_latent else {})
        )
        expected = write(kind, tmp_path, **changes)
        if key in NOT_COMPUTED_BY.get(kind, {}) and _COMPUTED[key] not in NOT_COMPUTED_BY[kind][key]:
            with pytest.raises(ConfigError, match=key):
                load(tmp_path)
        else:
            torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected, atol=1e-4, rtol=1e-4)
        return
    write(kind, tmp_path)
    change_config(tmp_path, **{key: {"hidden_act": "gelu"}.get(key, True)})
    with pytest.raises(ConfigError, match=key):
        load_config(tmp_path, "native")


@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("key", NOT_COMPUTED)
def test_a_key_that_is_not_computed_is_refused_by_name_unless_its_value_changes_nothing(
    kind: str, key: str, tmp_path: Path
) -> None:
    """transformers' modules compute the keys that their configuration class has."""
    make, options = _CLASSES[kind]
    architecture = AutoModelForCausalLM._model_mapping[make].__name__
    config = make(**SMALL_SIZES | options, architectures=[architecture]).to_dict()
    for value in (*NOT_COMPUTED[key], *([] if hasattr(make(), key) else [None])):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        assert is_native(load_config(tmp_path))
    for value in ("gelu", "gelu_pytorch_tanh", "relu") if key == "hidden_act" else (0.37, "other"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ConfigError, match=f"{key}.*{value!r}"):
            load_config(tmp_path, "native")
        if not hasattr(make, key):
            with pytest.raises(ConfigError, match=f"{key}.*{value!r}"):
                load_config(tmp_path)


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_transformers_modules_compute_what_the_native_class_does_not(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = write("llama", tmp_path, **changes)
    assert not is_native(load_config(tmp_path))
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected, atol=1e-4, rtol=1e-4)


ROPE: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize(("name", "positions"), [("yarn", 128), ("linear", 120), ("dynamic", 40), ("longrope", 32)])
def test_logits_up_to_the_end_of_a_scaled_context_equal_those_of_transformers(
    name: str, positions: int, tmp_path: Path
) -> None:
    """`max_position_embeddings` is 40 here; Qwen3's recipe for YaRN has another original length, too."""
    make, options = _CLASSES["qwen3"]
    config = make(
        **SMALL_SIZES | options | {"head_dim": 8, "max_position_embeddings": 40},
        rope_parameters={"rope_theta": 10000.0, **ROPE[name]},
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for key, tensor in model.named_parameters():
        spread(key, tensor)
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    stored = load_config(tmp_path)
    assert context_length(stored, None) == context_length(stored, positions) == positions
    with pytest.raises(ConfigError, match=f"context_length={positions + 1} is more than the {positions} positions"):
        context_length(stored, positions + 1)
    tokens = (TOKENS * 11)[:positions]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(load(tmp_path), tokens), expected, atol=1e-4, rtol=1e-4)


def test_chunked_and_sparse_attention_limit_the_context_and_windows_do_not(tmp_path: Path) -> None:
    def longest(config: PretrainedConfig) -> int:
        config.save_pretrained(tmp_path)
        return context_length(load_config(tmp_path), None)

    make, options = _CLASSES["qwen2"]
    windows = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert longest(make(**SMALL_SIZES | options | windows, architectures=["Qwen2ForCausalLM"])) == CONTEXT
    sizes = {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 64}
    assert longest(Llama4TextConfig(**SMALL_SIZES, **sizes)) == 64
    with pytest.raises(ConfigError, match=r"65 is more than the 64 positions of its attention_chunk_size.*SpecRay doe"):
        context_length(load_config(tmp_path), 65)
    sparse = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 48}
    assert longest(DeepseekV32Config(**SMALL_SIZES | _LATENT, **sparse)) == 48
    blocks = {"index_topk_blocks": 3, "index_block_size": 4, "layer_types": ["full_attention", "minimax_m3_sparse"]}
    text = MiniMaxM3VLTextConfig(**SMALL_SIZES | _MOE, **blocks, architectures=["MiniMaxM3VLForCausalLM"])
    assert longest(text) == 12


def test_an_output_matrix_in_the_file_is_used_although_the_embedding_is_said_to_be_shared(tmp_path: Path) -> None:
    write("llama", tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = reference.generate(torch.tensor([TOKENS]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    ours = generate(tmp_path, [TOKENS], [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)])
    assert ours[0].token_ids == theirs[0, len(TOKENS) :].tolist()
    model = load(tmp_path)
    assert not model.shape.tied
    matrices = TargetMatrices(model.shape, CONTEXT, tmp_path, "auto", torch.float32, torch.device("cpu"), None)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(matrices.head(None)(hidden), model.logits(hidden))


def test_a_missing_output_matrix_is_refused_unless_the_embedding_is_shared(tmp_path: Path) -> None:
    """transformers would draw random weights."""
    write("llama", tmp_path, tie_word_embeddings=True)
    load(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=false.*no tensor lm_head.weight.*set tie_word_emb"):
        load(tmp_path)


def test_tensors_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("mistral", tmp_path)
    load(tmp_path)
    assert not caplog.records
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.1.self_attn.{part}": torch.ones(8) for part in ("q_norm.weight", "rotary_emb.inv_freq")}
    extra |= {"model.layers.2.eh_proj.weight": torch.ones(8)}  # an MTP layer
    save_file(tensors | extra, tmp_path / "model.safetensors")
    load(tmp_path)
    [record] = caplog.records
    assert "1 tensors of" in record.message
    assert (
        "MistralForCausalLM and have no effect, as in transformers: model.layers.1.self_attn.q_norm.w" in record.message
    )


@pytest.mark.parametrize(
    "name", ["llama", "internlm3", "glm4_moe", "minimax_m2", "solar_open", "glm_ocr", "minimax_m3"]
)
def test_the_partial_rotary_factor_is_honoured_where_transformers_modules_read_it(name: str) -> None:
    """Their source says whether they do."""
    config: Any = decoder_config(name)
    if (text := config.get_text_config(decoder=True)) is not config:
        text.multimodal_config = config
    module = inspect.getmodule(type(decoder_of(build_skeleton(text, torch.float32))))
    assert reads_partial_rotary_factor(text) == ("partial_rotary_factor" in inspect.getsource(module))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "swoosh"}, "hidden_act='swoosh', which transformers does not know"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral'; supported are default"),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 8},
            "model_type=mamba has no attention: its layers keep a state",
        ),
    ],
)
def test_what_nothing_computes_is_refused_before_weights_are_read(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = LlamaConfig(**SMALL_SIZES, architectures=["LlamaForCausalLM"]).to_dict()
    if changes.get("model_type") == "mamba":
        config = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message):
        read_all(tmp_path)


def read_all(folder: Path) -> None:
    """What is read before any weight."""
    stored = load_config(folder)
    context_length(stored, None)
    shape_of(stored, RankGroup())


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "a_model_of_next_year"])
def test_another_architecture_is_refused_with_those_that_are_served(model_type: str, tmp_path: Path) -> None:
    config = SMALL_SIZES | {"model_type": model_type, "architectures": ["NextForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"architectures=\[NextForCausalLM\], which is not supported; .*Qwen3ForCausalLM"
    ):
        load_config(tmp_path)
