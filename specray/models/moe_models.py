"""Mixtral and Qwen3-MoE: the Llama family's attention with a mixture of experts as the feed-forward."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.layers.module import Layer
from specray.layers.moe import Expert, ExpertList, Experts, MixtureOfExperts, SoftmaxRoute
from specray.models.llama import Llama
from specray.models.loading import Loader
from specray.ops.device_ops import groups_experts

QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


class Mixtral(Llama):
    """Every layer is a mixture. The weights of a token's experts sum to 1."""

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:  # noqa: ARG003
        place, hidden, count = prefix + "block_sparse_moe.", config.hidden_size, config.num_local_experts
        experts = load_experts(loader, place, count, hidden, config.intermediate_size, _MIXTRAL_NAMES)
        route = SoftmaxRoute(config.num_experts_per_tok, normalize=True)
        return MixtureOfExperts(load_gate(loader, place, count, hidden), route, experts, loader.group)


class Qwen3Moe(Llama):
    """Layers are mixtures unless config.json lists them as dense."""

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:
        place, hidden, count = prefix + "mlp.", config.hidden_size, config.num_experts
        if index in config.mlp_only_layers or not count or (index + 1) % config.decoder_sparse_step:
            return super().feed_forward(config, loader, prefix, index)
        experts = load_experts(loader, place, count, hidden, config.moe_intermediate_size)
        route = SoftmaxRoute(config.num_experts_per_tok, normalize=config.norm_topk_prob)
        return MixtureOfExperts(load_gate(loader, place, count, hidden), route, experts, loader.group)


def load_gate(loader: Loader, prefix: str, num_experts: int, hidden_size: int) -> Tensor:
    """The router's weight, float32 [experts, hidden]."""
    return loader.stored(prefix + "gate.weight", (num_experts, hidden_size)).to(loader.device, torch.float32)


def load_experts(
    loader: Loader,
    prefix: str,
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    names: Sequence[str] = QWEN_NAMES,
) -> Experts:
    """This rank's part of every expert; `names` are those of gate, up and down."""
    part, wide = loader.group.share(ffn_size), (ffn_size, hidden_size)
    weights = []
    for index in range(num_experts):
        gate, up, down = (f"{prefix}experts.{index}.{name}.weight" for name in names)
        narrow = loader.as_stored(down, wide[::-1], part, 1)
        weights.append((loader.as_stored(gate, wide, part), loader.as_stored(up, wide, part), narrow))
    if groups_experts(loader.moe_runner_backend, loader.quantization, loader.device):
        from specray.ops.gpu.experts import GroupedExperts

        return GroupedExperts(weights)
    return ExpertList([Expert(*expert, loader.quantization) for expert in weights])
