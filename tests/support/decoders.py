"""Small random checkpoints of transformers' decoders, written by transformers, with the toy's vocabulary.

One line for each: the name of its configuration class, and what its configuration adds to `SMALL`.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from specray.models.target_model import TargetModel
from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.ops.states import StatefulAttend, StatePass, StateRows
from tests.support.architectures import spread
from tests.support.toy import BOS, CONTEXT, EOS, VOCAB_SIZE, toy_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOW: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GEMMA4: dict[str, Any] = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "final_logit_softcapping": 9.0,
    "use_bidirectional_attention": "vision",
    "pad_token_id": 1,
}
_PER_LAYER: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,  # they read the KV of layers 1 and 2
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": ...,
}
_SIGMOID: dict[str, Any] = {
    **_EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_CONVOLUTION: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

_INDEX: dict[str, Any] = {"index_topk": CONTEXT, "index_n_heads": 2, "index_head_dim": 8}
_SMALLER_HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 10,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT_ONLY: dict[str, Any] = {"vision_config": None, "audio_config": None}
_DEEPSTACK: dict[str, Any] = {"out_hidden_size": 32, "deepstack_visual_indexes": []}
_THREE_POSITIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
_THREE_HALF_POSITIONS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    }
}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", _WINDOW | {"use_sliding_window": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeConfig", _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "ministral": ("MinistralConfig", _WINDOW),
    "ministral3": ("Ministral3Config", {}),
    "mixtral": ("MixtralConfig", _EXPERTS | {"sliding_window": None}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        _WINDOW | {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    ),
    "gemma3": ("Gemma3TextConfig", _WINDOW | {"query_pre_attn_scalar": 12}),
    "gemma3n": (
        "Gemma3nTextConfig",
        _PER_LAYER
        | {
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4": ("Gemma4TextConfig", _GEMMA4 | _PER_LAYER | {"use_double_wide_mlp": True}),  # as E2B and E4B
    "gemma4-moe": (  # as 26B-A4B
        "Gemma4TextConfig",
        _GEMMA4
        | _EXPERTS
        | {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_unified": (  # as 12B
        "Gemma4UnifiedTextConfig",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gpt_oss": ("GptOssConfig", _EXPERTS | _WINDOW),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": ("Glm4MoeConfig", _SIGMOID),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _SIGMOID | _LATENT),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phimoe": ("PhimoeConfig", _EXPERTS),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _WINDOW),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "flex_olmo": ("FlexOlmoConfig", _EXPERTS),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2Config", _WINDOW | {"logit_scale": 0.5}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "granitemoe": ("GraniteMoeConfig", _EXPERTS | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "granitemoeshared": ("GraniteMoeSharedConfig", _EXPERTS | {"shared_intermediate_size": 40}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        _EXPERTS | {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "seed_oss": ("SeedOssConfig", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", _EXPERTS | {"moe_topk": 2}),
    "hy_v3": ("HYV3Config", _EXPERTS),
    "exaone4": ("Exaone4Config", _WINDOW),
    "exaone_moe": ("ExaoneMoeConfig", _SIGMOID | _WINDOW),
    "minimax_m2": ("MiniMaxM2Config", _EXPERTS),
    "nemotron": ("NemotronConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "stablelm": ("StableLmConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "apertus": ("ApertusConfig", {}),
    "helium": ("HeliumConfig", {}),
    "llama4": ("Llama4TextConfig", _EXPERTS | {"num_hidden_layers": 4, "intermediate_size_mlp": 48}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", _SIGMOID | _WINDOW | {"n_shared_experts": None}),
    "laguna": ("LagunaConfig", _EXPERTS | _WINDOW),
    "solar_open": ("SolarOpenConfig", _SIGMOID),
    "dots1": ("Dots1Config", _SIGMOID | _WINDOW),
    "jais2": ("Jais2Config", {}),
    "vaultgemma": ("VaultGemmaConfig", _WINDOW),
    "afmoe": ("AfmoeConfig", _SIGMOID | _WINDOW),
    "cwm": ("CwmConfig", _WINDOW),
    "youtu": ("YoutuConfig", _LATENT),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "persimmon": ("PersimmonConfig", {}),
    "biogpt": ("BioGptConfig", {}),
    "deepseek_v2": (
        "DeepseekV2Config",
        _SIGMOID | _LATENT | {"topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SIGMOID | _LATENT,
    ),
    "mellum": ("MellumConfig", _EXPERTS),
    "cohere2_moe": ("Cohere2MoeConfig", _EXPERTS | _WINDOW | {"logit_scale": 0.5}),
    "nanochat": ("NanoChatConfig", {}),
    "internlm3": ("InternLM3Config", {}),
    "hyperclovax": ("HyperCLOVAXConfig", {}),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "iquestcoder": ("IQuestCoderConfig", {}),
    "bitnet": ("BitNetConfig", {}),
    "flint": ("FlintConfig", {}),
    "axk1": ("AXK1Config", _SIGMOID | _LATENT),
    "deepseek_v32": ("DeepseekV32Config", _SIGMOID | _LATENT | _INDEX),
    "glm_moe_dsa": ("GlmMoeDsaConfig", _SIGMOID | _LATENT | _INDEX | {"indexer_types": ["full", "shared"]}),
    "axk2": ("AXK2Config", _SIGMOID | _LATENT | _INDEX),
    "dots3_note": (  # layers in a window have heads of their own
        "Dots3NoteTextConfig",
        _SIGMOID
        | _LATENT
        | _INDEX
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "indexed_attention", "sliding_attention"],
            "sliding_window": 16,
            "shared_experts_intermediate_size": 24,
            **{f"swa_{name}": size for name, size in _SMALLER_HEADS.items()},
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 40}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 40}),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA),
    "lfm2": ("Lfm2Config", _CONVOLUTION),
    "lfm2_moe": ("Lfm2MoeConfig", _EXPERTS | _CONVOLUTION | {"num_dense_layers": 1}),
}
# Language models of image and audio models: the whole model's configuration class, what its `text_config` adds to
# `SMALL`, its `vision_config` to `_VISION`, and its other fields.
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3-image": (
        "Gemma3Config",
        _WINDOW | {"query_pre_attn_scalar": 12},
        {},
        {"mm_tokens_per_image": 4},
    ),
    "gemma4-image": ("Gemma4Config", _GEMMA4 | _PER_LAYER | {"use_double_wide_mlp": True}, {}, _TEXT_ONLY),
    "gemma4_unified-image": ("Gemma4UnifiedConfig", _GEMMA4, {}, _TEXT_ONLY),
    "mistral-image": ("Mistral3Config", {"model_type": "mistral", "sliding_window": 16}, {"model_type": "pixtral"}, {}),
    "ministral3-image": ("Mistral3Config", {"model_type": "ministral3"}, {"model_type": "pixtral"}, {}),
    "mistral4": (
        "Mistral3Config",
        _SIGMOID | _LATENT | {"model_type": "mistral4"},
        {"model_type": "pixtral"},
        {},
    ),
    "llava": ("LlavaConfig", {"model_type": "llama"}, {"model_type": "clip_vision_model"}, {}),
    "smolvlm": ("SmolVLMConfig", {"model_type": "qwen2"}, {}, {}),
    "internvl": ("InternVLConfig", {"model_type": "qwen3"}, {"image_size": [28, 28], "patch_size": [14, 14]}, {}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", _THREE_POSITIONS, {"out_hidden_size": 32, "fullatt_block_indexes": [0]}, {}),
    "qwen3_5-image": ("Qwen3_5Config", _DELTA, {"out_hidden_size": 32}, {}),
    "qwen3_vl": ("Qwen3VLConfig", _THREE_POSITIONS, _DEEPSTACK, {}),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", _THREE_POSITIONS | _EXPERTS, _DEEPSTACK, {}),
    "glm4v": ("Glm4vConfig", _THREE_HALF_POSITIONS, {"out_hidden_size": 32}, {}),
    "glm4v_moe": ("Glm4vMoeConfig", _THREE_HALF_POSITIONS | _SIGMOID, {"out_hidden_size": 32}, {}),
    "glm_ocr": ("GlmOcrConfig", _THREE_POSITIONS, {"out_hidden_size": 32}, {}),
    "kimi_k25": ("Kimi_K25Config", _SIGMOID | _LATENT | {"model_type": "deepseek_v3"}, {}, {}),
    "llama4-image": (
        "Llama4Config",
        _EXPERTS | {"num_hidden_layers": 4, "intermediate_size_mlp": 48},
        {"vision_output_dim": 16},
        {},
    ),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        _WINDOW,
        {},
        {"out_hidden_size": 64, "projector_hidden_size": 16},
    ),
    "step3p7": (
        "Step3p7Config",
        _EXPERTS
        | _WINDOW
        | {
            "pad_token_id": 3,
            "num_sliding_attention_heads": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "share_expert_dim": 16,
            "swiglu_limits": [0.0, 0.0, 0.3],
            "swiglu_limits_shared": [0.0, 0.3, 0.0],
        },
        {},
        {},
    ),
    "minimax_m3": (
        "MiniMaxM3VLConfig",
        _EXPERTS
        | {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "index_head_dim": 8,
            "index_n_heads": 2,
            "rotary_dim": 4,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 16,
        },
        {},
        {},
    ),
}


# Together they have every kind of attention, experts, head and checkpoint layout of the table.
QUICK = {
    *(
        "llama",
        "qwen2-window",
        "qwen3",
        "mixtral",
        "gemma2",
        "gemma4",
        "gpt_oss",
        "glm4_moe",
        "phi3",
        "olmo2",
        "cohere",
    ),
    *("granite", "llama4", "mimo_v2_flash", "gpt2", "opt", "deepseek_v2", "ernie4_5_moe", "deepseek_v32", "minicpm3"),
    *("qwen3_vl_moe", "kimi_k25", "llama4-image", "muse_glimmer"),
    *("qwen3_next", "qwen3_5", "lfm2"),
}
# What is refused, and why.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "diffllama": ("DiffLlamaConfig", {}, "call attention 4 times in 2 layers"),
    "gptj": ("GPTJConfig", {"rotary_dim": 4}, "do not call an attention function that can be replaced"),
    "falcon": ("FalconConfig", {"head_dim": ..., "alibi": False}, "do not call an attention function"),
    "longcat_flash": (
        "LongcatFlashConfig",
        _EXPERTS | _LATENT | {"head_dim": 4},
        "cannot run over one flat batch of tokens: .*nonzero",
    ),
    "inkling": ("InklingTextConfig", _EXPERTS, "layers of type hybrid_sliding, which keep a state"),
    "deepseek_v4": ("DeepseekV4Config", _SIGMOID | _LATENT, "layers of type heavily_compressed_attention"),
    "mamba": ("MambaConfig", {}, "layers of type linear_attention, which keep a state"),
    "bloom": ("BloomConfig", {}, "cannot run over one flat batch of tokens"),
}


def decoder_config(name: str, dtype: str = "float32", **changes: Any) -> PretrainedConfig:
    """The configuration of a whole image or audio model, where the decoder is one's language model."""
    class_name, fields, *others = IMAGE_MODELS.get(name) or SERVED.get(name) or REFUSED[name][:2]
    values = {name: value for name, value in (SMALL | fields | changes).items() if value is not ...}
    if others:
        vision, rest = others
        values = {"text_config": values, "vision_config": _VISION | vision, "tie_word_embeddings": False, **rest}
    config: PretrainedConfig = getattr(transformers, class_name)(**values, dtype=dtype)
    return config


def write_decoder(name: str, folder: Path, seed: int = 5, **changes: Any) -> PreTrainedModel:
    """Write a model folder, with `changes` of its configuration; returns what `random_decoder` does."""
    model = random_decoder(name, seed, **changes)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return model


def random_decoder(name: str, seed: int = 5, **changes: Any) -> PreTrainedModel:
    """Transformers' model, with `changes` of its configuration and its own attention."""
    torch.manual_seed(seed)
    config = decoder_config(name, **changes)
    auto: Any = AutoModelForMultimodalLM if name in IMAGE_MODELS else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, attn_implementation="eager").float().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and key not in computed_buffers(model):
            spread(key, tensor)
            if key.endswith("A_log"):
                tensor.data -= 2.0  # so that states forget slowly
            elif "linear_attn." in key and "norm" not in key:
                tensor.data *= 0.5  # else rounding differs by more than 1e-4 between transformers' own two forms
            elif name.startswith(("qwen3_next", "qwen3_5")) and "norm" in key and "linear_attn." not in key:
                tensor.data -= 1.0  # these norms' weights are differences from 1
    model.tie_weights()
    return model


def computed_buffers(model: PreTrainedModel) -> set[str]:
    """Those that no checkpoint has, such as rotary frequencies."""
    return {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }


@torch.inference_mode()
def logits_of(reference: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    logits: torch.Tensor = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits


@torch.inference_mode()
def logits_in_chunks(model: TargetModel, tokens: list[int], size: int) -> torch.Tensor:
    """Logits of all tokens of a prompt that is read `size` tokens at a time."""
    shape = model.shape
    states = [torch.zeros(1, *state.shape, dtype=state.dtype) for state in shape.states]
    sizes = (shape.num_kv_layers, len(tokens) + 1, shape.num_local_kv_heads, shape.head_dim)
    pool = make_pool(*sizes, torch.float32, torch.device("cpu"))
    attention = make_backend("auto", pool, shape.num_local_heads, layers=model.layer_attention)
    slots, parts = torch.arange(1, len(tokens) + 1), []
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        batch = AttentionBatch([end - start], [end], slots[None], slots[start:end], [(0, 0)])
        attend: Any = attention.plan(batch)
        if states:
            kept = StatePass(states, StateRows.of([0], [end - start], [end - start], [start == 0]))
            attend = StatefulAttend(attend, kept)
        hidden, _ = model(torch.tensor(tokens[start:end]), torch.arange(start, end), attend)
        parts.append(model.logits(hidden))
    return torch.cat(parts)
