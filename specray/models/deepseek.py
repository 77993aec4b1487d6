"""DeepSeek-V2 and -V3: latent attention, some dense layers, then mixtures of experts with shared experts.

Two details follow transformers and not the papers: the norms inside the attention have an eps of 1e-6, whatever
config.json says, and V2 ignores norm_topk_prob.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.layers.linear import ColumnParallelLinear, RowParallelLinear
from specray.layers.mla import LatentAttention, LatentSizes, half_split
from specray.layers.module import Layer
from specray.layers.moe import Expert, MixtureOfExperts, Route, SigmoidRoute, SoftmaxRoute
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.causal_lm import CausalLM
from specray.models.loading import Loader
from specray.models.moe_models import load_experts, load_gate
from specray.models.target_model import ModelShape
from specray.ops.linear import take_rows

_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeepseekShape(ModelShape):
    """Sizes of a checkpoint with latent attention. Every rank's KV pool has one KV head: the latent."""

    num_heads: int
    latent: LatentSizes


class Deepseek(CausalLM):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

    can_round_kv = False  # a row mixes a latent and rotary positions, which are of different sizes
    expanded = ("kv_b_proj.weight",)  # it is used head by head

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> DeepseekShape:
        heads = group.share(config.num_attention_heads)
        latent = LatentSizes(config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
        return DeepseekShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            num_local_heads=heads.stop - heads.start,
            num_local_kv_heads=1,
            head_dim=latent.pool_dim,
            num_heads=config.num_attention_heads,
            latent=latent,
        )

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, loader: Loader, max_positions: int) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, max_positions, loader.dtype, loader.device)

    @classmethod
    def attention(cls, config: PretrainedConfig, loader: Loader, prefix: str, kv_layer: int) -> Layer:
        return _attention(config, cls.shape_of(config, loader.group), loader, prefix, kv_layer)

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:
        if index < config.first_k_dense_replace:
            return super().feed_forward(config, loader, prefix, index)
        return _mixture(config, loader, prefix + "mlp.")


def _attention(
    config: PretrainedConfig, shape: DeepseekShape, loader: Loader, prefix: str, kv_layer: int
) -> LatentAttention:
    sizes, hidden = shape.latent, shape.hidden_size
    compress = loader.as_stored(prefix + "kv_a_proj_with_mqa.weight", (sizes.pool_dim, hidden))
    order = _row_order(config, 1, sizes.kv_rank, sizes.rope_dim)
    part = loader.group.share(shape.num_heads, sizes.value_dim)
    out = loader.as_stored(prefix + "o_proj.weight", (hidden, shape.num_heads * sizes.value_dim), part, 1)
    return LatentAttention(
        kv_layer,
        sizes,
        query=_query(config, shape, loader, prefix),
        compress=ColumnParallelLinear(take_rows(compress, order), quantization=loader.quantization),
        latent_norm=RMSNorm(loader.tensor(prefix + "kv_a_layernorm.weight", (sizes.kv_rank,)), _LATENT_EPS),
        expand=_of_heads(loader, prefix + "kv_b_proj.weight", shape, sizes.nope_dim + sizes.value_dim, sizes.kv_rank),
        out=RowParallelLinear(out, loader.group, quantization=loader.quantization),
        scale=sizes.query_dim**-0.5 * _long_context_scale(config),
    )


def _query(config: PretrainedConfig, shape: DeepseekShape, loader: Loader, prefix: str) -> nn.Module:
    """Module of x [T, hidden] -> this rank's queries, through a query latent if the model has one."""
    sizes, rank = shape.latent, config.q_lora_rank
    name, width = ("q_proj", shape.hidden_size) if rank is None else ("q_b_proj", rank)
    part = loader.group.share(shape.num_heads, sizes.query_dim)
    stored = loader.as_stored(f"{prefix}{name}.weight", (shape.num_heads * sizes.query_dim, width), part)
    rows = take_rows(stored, _row_order(config, shape.num_local_heads, sizes.nope_dim, sizes.rope_dim))
    project = ColumnParallelLinear(rows, quantization=loader.quantization)
    if rank is None:
        return project
    weight = loader.as_stored(prefix + "q_a_proj.weight", (rank, shape.hidden_size))
    compress = ColumnParallelLinear(weight, quantization=loader.quantization)
    norm = RMSNorm(loader.tensor(prefix + "q_a_layernorm.weight", (rank,)), _LATENT_EPS)
    return nn.Sequential(compress, norm, project)


def _of_heads(loader: Loader, name: str, shape: DeepseekShape, per_head: int, width: int) -> Tensor:
    """The rows of this rank's heads, [heads, per_head, width]."""
    part = loader.group.share(shape.num_heads, per_head)
    return loader.tensor(name, (shape.num_heads * per_head, width), part).view(-1, per_head, width)


def _row_order(config: PretrainedConfig, num_heads: int, num_plain: int, num_rotary: int) -> Tensor:
    """int64: the rows of heads of `num_plain` and then `num_rotary` rows, these in half-split order."""
    index = torch.arange(num_heads * (num_plain + num_rotary)).view(num_heads, -1, 1)
    plain, rotary = index.split_with_sizes((num_plain, num_rotary), 1)
    return torch.cat((plain, _ordered(config, rotary)), 1).flatten()


def _ordered(config: PretrainedConfig, rows: Tensor) -> Tensor:
    """Rotary rows [..., rope_dim, in] in half-split order. A V3 config.json can state that they are stored so."""
    return half_split(rows, config.qk_rope_head_dim) if getattr(config, "rope_interleave", True) else rows


def _mixture(config: PretrainedConfig, loader: Loader, prefix: str) -> MixtureOfExperts:
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    return MixtureOfExperts(
        load_gate(loader, prefix, count, hidden),
        _route(config, loader, prefix),
        load_experts(loader, prefix, count, hidden, width),
        loader.group,
        _shared_expert(hidden, width * config.n_shared_experts, loader, prefix + "shared_experts."),
    )


def _shared_expert(hidden_size: int, ffn_size: int, loader: Loader, prefix: str) -> Expert:
    """This rank's part of the feed-forward of all tokens, which the mixture adds before its sum over ranks."""
    size, part = (ffn_size, hidden_size), loader.group.share(ffn_size)
    gate, up = (loader.weight(f"{prefix}{name}_proj.weight", size, part) for name in ("gate", "up"))
    return Expert(gate, up, loader.weight(prefix + "down_proj.weight", size[::-1], part, 1), loader.quantization)


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


def _long_context_scale(config: PretrainedConfig) -> float:
    """Factor of the softmax scale for YaRN's mscale_all_dim."""
    rope = dict(config.rope_parameters or {})
    stretch, strength = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not strength or stretch <= 1:
        return 1.0
    return float((0.1 * strength * math.log(stretch) + 1.0) ** 2)
