"""Small random checkpoints of transformers' architectures, written by transformers, with the toy's vocabulary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.toy import BOS, CONTEXT, EOS, VOCAB_SIZE, toy_tokenizer

SMALL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    **SMALL_SIZES,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
    "beta_fast": 32,
    "beta_slow": 1,
}
_GROUPS = {"n_group": 4, "topk_group": 2}

ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL_SIZES, **_EXPERTS, head_dim=16, num_experts=6, norm_topk_prob=True)
    ),
    "qwen3-moe-sparse": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL_SIZES | {"num_hidden_layers": 3}, **_EXPERTS, head_dim=8, num_experts=6, mlp_only_layers=[2]
        )
    ),
    "deepseek-v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**_LATENT | {"q_lora_rank": None}, n_shared_experts=2, topk_method="greedy")
    ),
    "deepseek-v2-groups": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_LATENT, **_GROUPS, n_shared_experts=1, topk_method="group_limited_greedy", rope_parameters=_YARN
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**_LATENT, **_GROUPS, n_shared_experts=1, norm_topk_prob=True, rope_parameters=_YARN)
    ),
    "deepseek-v3-flat": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_LATENT | {"q_lora_rank": None},
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            norm_topk_prob=False,
            rope_interleave=False,
        )
    ),
}


def write_architecture(name: str, folder: Path, seed: int = 5) -> PreTrainedModel:
    """Write a model folder; returns transformers' model with the same weights."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]().float().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in key:
            spread(key, tensor)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return model


def spread(name: str, tensor: torch.Tensor) -> None:
    """Random values for which every part of a layer affects the output; norms and scalars around 1."""
    with torch.no_grad():
        if "norm" in name or "scalar" in name:
            tensor.copy_(1 + 0.3 * torch.randn(tensor.shape))
        else:
            tensor.copy_(0.35 * torch.randn(tensor.shape))
