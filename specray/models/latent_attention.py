"""Loads the latent attention of a checkpoint with DeepSeek's names of tensors; its arithmetic is in `layers.mla`.

As transformers and not the papers, its norms have an eps of 1e-6, whatever config.json says.
"""

import math

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.layers.linear import ColumnParallelLinear, RowParallelLinear
from specray.layers.mla import LatentAttention, LatentSizes, half_split
from specray.layers.norm import RMSNorm
from specray.models.loading import Loader
from specray.ops.linear import take_rows

_EPS = 1e-6


def latent_sizes(config: PretrainedConfig) -> LatentSizes:
    """Those of a config with DeepSeek's keys."""
    return LatentSizes(config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)


def load_latent_attention(config: PretrainedConfig, loader: Loader, prefix: str, kv_layer: int) -> LatentAttention:
    """This rank's heads, from tensors `prefix`*; each rank has the whole latent."""
    sizes, hidden, heads = latent_sizes(config), config.hidden_size, config.num_attention_heads
    compress = loader.as_stored(prefix + "kv_a_proj_with_mqa.weight", (sizes.pool_dim, hidden))
    order = _row_order(config, 1, sizes.kv_rank)
    part = loader.group.share(heads, sizes.value_dim)
    out = loader.as_stored(prefix + "o_proj.weight", (hidden, heads * sizes.value_dim), part, 1)
    per_head = sizes.nope_dim + sizes.value_dim
    rows = loader.group.share(heads, per_head)
    expand = loader.tensor(prefix + "kv_b_proj.weight", (heads * per_head, sizes.kv_rank), rows)
    return LatentAttention(
        kv_layer,
        sizes,
        query=_query(config, loader, prefix),
        compress=ColumnParallelLinear(take_rows(compress, order), quantization=loader.quantization),
        latent_norm=RMSNorm(loader.tensor(prefix + "kv_a_layernorm.weight", (sizes.kv_rank,)), _EPS),
        expand=expand.view(-1, per_head, sizes.kv_rank),
        out=RowParallelLinear(out, loader.group, quantization=loader.quantization),
        scale=sizes.query_dim**-0.5 * _long_context_scale(config),
    )


def _query(config: PretrainedConfig, loader: Loader, prefix: str) -> nn.Module:
    """Module of x [T, hidden] -> this rank's queries, through a query latent if the model has one."""
    sizes, rank, heads = latent_sizes(config), config.q_lora_rank, config.num_attention_heads
    name, width = ("q_proj", config.hidden_size) if rank is None else ("q_b_proj", rank)
    part, local = loader.group.share(heads, sizes.query_dim), loader.group.share(heads)
    stored = loader.as_stored(f"{prefix}{name}.weight", (heads * sizes.query_dim, width), part)
    rows = take_rows(stored, _row_order(config, local.stop - local.start, sizes.nope_dim))
    project = ColumnParallelLinear(rows, quantization=loader.quantization)
    if rank is None:
        return project
    weight = loader.as_stored(prefix + "q_a_proj.weight", (rank, config.hidden_size))
    compress = ColumnParallelLinear(weight, quantization=loader.quantization)
    norm = RMSNorm(loader.tensor(prefix + "q_a_layernorm.weight", (rank,)), _EPS)
    return nn.Sequential(compress, norm, project)


def _row_order(config: PretrainedConfig, num_heads: int, num_plain: int) -> Tensor:
    """int64: the rows of heads of `num_plain` and then rotary rows, these in half-split order.

    A config.json of V3 can state that they are stored so.
    """
    index = torch.arange(num_heads * (num_plain + config.qk_rope_head_dim)).view(num_heads, -1, 1)
    plain, rotary = index.split_with_sizes((num_plain, config.qk_rope_head_dim), 1)
    if getattr(config, "rope_interleave", True):
        rotary = half_split(rotary, config.qk_rope_head_dim)
    return torch.cat((plain, rotary), 1).flatten()


def _long_context_scale(config: PretrainedConfig) -> float:
    """Factor of the softmax scale for YaRN's mscale_all_dim."""
    rope = dict(config.rope_parameters or {})
    stretch, strength = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not strength or stretch <= 1:
        return 1.0
    return float((0.1 * strength * math.log(stretch) + 1.0) ** 2)
