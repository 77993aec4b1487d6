"""DeepSeek-V2 and -V3: latent attention, a few dense layers, then mixtures of experts with experts all tokens share.

What lives here: what their checkpoints hold and how it becomes layers. Not here: the attention (`specray.layers.mla`),
routing (`specray.layers.moe`), the extra layer that drafts (`mtp`). Found in transformers rather than in papers: the
norms inside the attention have an eps of 1e-6, whatever config.json says of the others; V2 ignores norm_topk_prob.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, RowParallelLinear
from specray.layers.mla import LatentAttention, LatentSizes, half_split
from specray.layers.moe import MixtureOfExperts, Route, SigmoidRoute, SoftmaxRoute
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.llama import Feed, FeedForward, Llama, LlamaShape
from specray.models.loading import Loader
from specray.models.moe_models import load_experts, load_gate

_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentShape(LlamaShape):
    """To the KV pool and its kernels there is one KV head, that of the latent, on every rank."""

    heads: slice  # this rank's query heads

    @property
    def num_local_heads(self) -> int:
        return int(self.heads.stop - self.heads.start)


class Deepseek(Llama):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

    @classmethod
    def shape_of(cls, config: PretrainedConfig, group: RankGroup) -> LatentShape:
        _check(config)
        return LatentShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=1,
            head_dim=_sizes(config).pool_dim,
            ffn_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            qkv_bias=False,
            output_bias=False,
            qk_norm=False,
            tied=bool(config.tie_word_embeddings),
            kv_heads=slice(0, 1),
            ffn=group.share(config.intermediate_size),
            heads=group.share(config.num_attention_heads),
        )

    @classmethod
    def rotary_of(
        cls,
        config: PretrainedConfig,
        shape: LlamaShape,  # noqa: ARG003
        max_positions: int,
        loader: Loader,
    ) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, max_positions, loader.dtype, loader.device)

    @classmethod
    def attention(
        cls, config: PretrainedConfig, shape: LlamaShape, kv_layer: int, prefix: str, loader: Loader, group: RankGroup
    ) -> LatentAttention:
        assert isinstance(shape, LatentShape)
        return _attention(config, shape, kv_layer, prefix + "self_attn.", loader, group)

    @classmethod
    def feed_forward(
        cls, config: PretrainedConfig, shape: LlamaShape, index: int, prefix: str, loader: Loader, group: RankGroup
    ) -> Feed:
        if index < config.first_k_dense_replace:
            return super().feed_forward(config, shape, index, prefix, loader, group)
        return _mixture(config, shape, prefix + "mlp.", loader, group)


def _attention(
    config: PretrainedConfig, shape: LatentShape, kv_layer: int, place: str, loader: Loader, group: RankGroup
) -> LatentAttention:
    sizes, hidden = _sizes(config), shape.hidden_size
    compress = loader.tensor(place + "kv_a_proj_with_mqa.weight", (sizes.pool_dim, hidden))
    latent, turned = compress.split_with_sizes((sizes.kv_rank, sizes.rope_dim))
    expand = _of_heads(loader, place + "kv_b_proj.weight", shape, sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
    width = sizes.value_dim
    part = slice(shape.heads.start * width, shape.heads.stop * width)
    out = loader.tensor(place + "o_proj.weight", (hidden, shape.num_heads * width), part, 1)
    return LatentAttention(
        kv_layer,
        sizes,
        query=_query(config, shape, place, loader),
        compress=ColumnParallelLinear(torch.cat((latent, _ordered(config, turned))), quantization=loader.quantization),
        latent_norm=RMSNorm(loader.tensor(place + "kv_a_layernorm.weight", (sizes.kv_rank,)), _LATENT_EPS),
        expand=expand,
        out=RowParallelLinear(out.contiguous(), group, quantization=loader.quantization),
        scale=sizes.query_dim**-0.5 * _long_context_scale(config),
    )


def _query(config: PretrainedConfig, shape: LatentShape, place: str, loader: Loader) -> Callable[[Tensor], Tensor]:
    """Function of x [T, hidden] to this rank's queries, through a latent of their own where the model has one."""
    sizes, rank = _sizes(config), config.q_lora_rank
    name, width = ("q_proj", shape.hidden_size) if rank is None else ("q_b_proj", rank)
    stored = _of_heads(loader, f"{place}{name}.weight", shape, sizes.query_dim, width)
    plain, turned = stored.split_with_sizes((sizes.nope_dim, sizes.rope_dim), 1)
    rows = torch.cat((plain, _ordered(config, turned)), 1).flatten(0, 1)
    project = ColumnParallelLinear(rows, quantization=loader.quantization)
    if rank is None:
        return project
    weight = loader.tensor(place + "q_a_proj.weight", (rank, shape.hidden_size))
    compress = ColumnParallelLinear(weight, quantization=loader.quantization)
    norm = RMSNorm(loader.tensor(place + "q_a_layernorm.weight", (rank,)), _LATENT_EPS)
    return lambda x: project(norm(compress(x)))


def _of_heads(loader: Loader, name: str, shape: LatentShape, per_head: int, width: int) -> Tensor:
    """This rank's heads' rows of a matrix, [heads, per_head, width]."""
    part = slice(shape.heads.start * per_head, shape.heads.stop * per_head)
    return loader.tensor(name, (shape.num_heads * per_head, width), part).view(-1, per_head, width)


def _ordered(config: PretrainedConfig, rows: Tensor) -> Tensor:
    """Rotary rows [..., rope_dim, in] in half-split order; only V3's config.json can say that they already are."""
    return half_split(rows, config.qk_rope_head_dim) if getattr(config, "rope_interleave", True) else rows


def _mixture(
    config: PretrainedConfig, shape: LlamaShape, place: str, loader: Loader, group: RankGroup
) -> MixtureOfExperts:
    hidden, width = shape.hidden_size, config.moe_intermediate_size
    shared = width * config.n_shared_experts
    experts = load_experts(loader, place, config.n_routed_experts, hidden, width, group)
    return MixtureOfExperts(
        load_gate(loader, place, config.n_routed_experts, hidden),
        _route(config, place, loader),
        experts,
        group,
        FeedForward(replace(shape, ffn_size=shared, ffn=group.share(shared)), loader, group, place + "shared_experts."),
    )


def _route(config: PretrainedConfig, place: str, loader: Loader) -> Route:
    groups: dict[str, Any] = {"num_groups": config.n_group or 1, "num_chosen_groups": config.topk_group or 1}
    if config.model_type == "deepseek_v3":
        bias = loader.stored(place + "gate.e_score_correction_bias", (config.n_routed_experts,))
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


def _sizes(config: PretrainedConfig) -> LatentSizes:
    return LatentSizes(config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)


def _long_context_scale(config: PretrainedConfig) -> float:
    """What stretched positions (YaRN's mscale_all_dim) multiply the softmax's scale with."""
    rope = dict(config.rope_parameters or {})
    stretch, strength = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not strength or stretch <= 1:
        return 1.0
    return float((0.1 * strength * math.log(stretch) + 1.0) ** 2)


def _check(config: PretrainedConfig) -> None:
    """ConfigError for what these checkpoints could say, and none is known to."""
    methods = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}[config.model_type]
    for name, known in (
        ("topk_method", methods),
        ("attention_bias", (False,)),
        ("moe_layer_freq", (1,)),
        ("hidden_act", ("silu",)),
    ):
        value = getattr(config, name, known[0])
        if value not in known:
            raise ConfigError(
                f"config.json of the DeepSeek target has {name}={value!r}; served are {', '.join(map(repr, known))}"
            )
