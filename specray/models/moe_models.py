"""Mixtral and Qwen3-MoE: the Llama family's attention with a mixture of experts as the feed-forward."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from specray.layers.module import Layer
from specray.layers.moe import Expert, ExpertList, Experts, MixtureOfExperts, Route, SoftmaxRoute
from specray.models.llama import Llama
from specray.models.loading import Loader
from specray.ops.device_ops import groups_experts

_NAMES = ("gate_proj", "up_proj", "down_proj")


class Mixtral(Llama):
    """Every layer is a mixture. The weights of a token's experts sum to 1."""

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:  # noqa: ARG003
        place, count, width = prefix + "block_sparse_moe.", config.num_local_experts, config.intermediate_size
        route = SoftmaxRoute(config.num_experts_per_tok, normalize=True)
        return load_mixture(config, loader, place, count, width, route, ("w1", "w3", "w2"))


class Qwen3Moe(Llama):
    """Layers are mixtures unless config.json lists them as dense."""

    @classmethod
    def feed_forward(cls, config: PretrainedConfig, loader: Loader, prefix: str, index: int) -> Layer:
        count, width = config.num_experts, config.moe_intermediate_size
        if index in config.mlp_only_layers or not count or (index + 1) % config.decoder_sparse_step:
            return super().feed_forward(config, loader, prefix, index)
        route = SoftmaxRoute(config.num_experts_per_tok, normalize=config.norm_topk_prob)
        return load_mixture(config, loader, prefix + "mlp.", count, width, route)


def load_mixture(
    config: PretrainedConfig,
    loader: Loader,
    prefix: str,
    num_experts: int,
    ffn_size: int,
    route: Route,
    names: Sequence[str] = _NAMES,
    shared: tuple[str, int] | None = None,
) -> MixtureOfExperts:
    """This rank's part of every expert, from tensors `prefix`*; `names` are those of gate, up and down.

    `shared` are the prefix and the width of a feed-forward of all tokens, beside the experts.
    """
    hidden = config.hidden_size
    experts = _load_experts(loader, prefix, num_experts, hidden, ffn_size, names)
    gate = loader.stored(prefix + "gate.weight", (num_experts, hidden)).to(loader.device, torch.float32)
    whole = None if shared is None else _load_shared(loader, prefix + shared[0], hidden, shared[1])
    return MixtureOfExperts(gate, route, experts, whole)


def _load_experts(
    loader: Loader, prefix: str, num_experts: int, hidden_size: int, ffn_size: int, names: Sequence[str]
) -> Experts:
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


def _load_shared(loader: Loader, prefix: str, hidden_size: int, ffn_size: int) -> Expert:
    """This rank's part, which the mixture adds before its sum over ranks."""
    wide, part = (ffn_size, hidden_size), loader.group.share(ffn_size)
    gate, up = (loader.weight(f"{prefix}{name}_proj.weight", wide, part) for name in ("gate", "up"))
    return Expert(gate, up, loader.weight(prefix + "down_proj.weight", wide[::-1], part, 1), loader.quantization)
