"""DeepSeek-V2 and -V3: latent attention, some dense layers, then mixtures of experts with shared experts.

As transformers and not the paper, V2 ignores norm_topk_prob.
"""

from typing import Any

import torch
from transformers import PretrainedConfig

from specray.layers.module import Layer
from specray.layers.moe import Route, SigmoidRoute, SoftmaxRoute
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.causal_lm import CausalLM
from specray.models.latent_attention import latent_sizes, load_latent_attention
from specray.models.loading import Loader
from specray.models.moe_models import load_mixture
from specray.models.target_model import ModelShape


class Deepseek(CausalLM):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM. Every rank's KV pool has one KV head: the latent."""

    can_round_kv = False  # a row mixes a latent and rotary positions, which are of different sizes
    expanded = ("kv_b_proj.weight",)  # it is used head by head

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> ModelShape:
        heads = group.share(config.num_attention_heads)
        return ModelShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            num_local_heads=heads.stop - heads.start,
            num_local_kv_heads=1,
            head_dim=latent_sizes(config).pool_dim,
        )

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, loader: Loader, max_positions: int) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, max_positions, loader.dtype, loader.device)

    @classmethod
    def attention(cls, config: PretrainedConfig, loader: Loader, prefix: str, kv_layer: int) -> Layer:
        return load_latent_attention(config, loader, prefix, kv_layer)

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:
        if index < config.first_k_dense_replace:
            return super().feed_forward(config, loader, prefix, index)
        width, route = config.moe_intermediate_size, _route(config, loader, prefix + "mlp.")
        shared = ("shared_experts.", width * config.n_shared_experts)
        return load_mixture(config, loader, prefix + "mlp.", config.n_routed_experts, width, route, shared=shared)


def _route(config: PretrainedConfig, loader: Loader, prefix: str) -> Route:
    groups: dict[str, Any] = {"num_groups": config.n_group or 1, "num_chosen_groups": config.topk_group or 1}
    if config.model_type == "deepseek_v3":
        bias = loader.stored(prefix + "gate.e_score_correction_bias", (config.n_routed_experts,))
        return SigmoidRoute(
            bias.to(loader.device, torch.float32),
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.routed_scaling_factor,
            **groups,
        )
    if config.topk_method == "greedy":
        groups = {}
    return SoftmaxRoute(config.num_experts_per_tok, scale=config.routed_scaling_factor, **groups)
