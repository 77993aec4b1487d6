"""Mixtral and Qwen3-MoE: the Llama family's attention with a mixture of experts in place of the feed-forward.

Not here: routing and the sum over experts (`specray.layers.moe`), DeepSeek (`deepseek`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.layers.moe import Expert, MixtureOfExperts, SoftmaxRoute
from specray.layers.parallel import RankGroup
from specray.models.llama import Feed, Llama, LlamaShape
from specray.models.loading import Loader

QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


class Mixtral(Llama):
    """Every layer a mixture; the chosen experts' weights sum to 1."""

    @classmethod
    def feed_forward(
        cls,
        config: PretrainedConfig,
        shape: LlamaShape,
        index: int,  # noqa: ARG003
        prefix: str,
        loader: Loader,
        group: RankGroup,
    ) -> Feed:
        place, hidden, count = prefix + "block_sparse_moe.", shape.hidden_size, config.num_local_experts
        experts = load_experts(loader, place, count, hidden, shape.ffn_size, group, _MIXTRAL_NAMES)
        route = SoftmaxRoute(config.num_experts_per_tok, normalise=True)
        return MixtureOfExperts(load_gate(loader, place, count, hidden), route, experts, group)


class Qwen3Moe(Llama):
    """Layers are mixtures but where config.json says otherwise."""

    @classmethod
    def feed_forward(
        cls, config: PretrainedConfig, shape: LlamaShape, index: int, prefix: str, loader: Loader, group: RankGroup
    ) -> Feed:
        place, hidden, count = prefix + "mlp.", shape.hidden_size, config.num_experts
        if index in config.mlp_only_layers or not count or (index + 1) % config.decoder_sparse_step:
            return super().feed_forward(config, shape, index, prefix, loader, group)
        experts = load_experts(loader, place, count, hidden, config.moe_intermediate_size, group)
        route = SoftmaxRoute(config.num_experts_per_tok, normalise=config.norm_topk_prob)
        return MixtureOfExperts(load_gate(loader, place, count, hidden), route, experts, group)


def load_gate(loader: Loader, prefix: str, num_experts: int, hidden_size: int) -> Tensor:
    """The router's float32 [experts, hidden]."""
    return loader.stored(prefix + "gate.weight", (num_experts, hidden_size)).to(loader.device, torch.float32)


def load_experts(
    loader: Loader,
    prefix: str,
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    group: RankGroup,
    names: Sequence[str] = QWEN_NAMES,
) -> list[Expert]:
    """All experts, of each this rank's part of its `ffn_size`; `names` are those of gate, up and down."""
    part, wide = group.share(ffn_size), (ffn_size, hidden_size)
    experts = []
    for index in range(num_experts):
        gate, up, down = (f"{prefix}experts.{index}.{name}.weight" for name in names)
        narrow = loader.tensor(down, wide[::-1], part, 1).contiguous()
        matrices = (loader.tensor(gate, wide, part), loader.tensor(up, wide, part), narrow)
        experts.append(Expert(*matrices, loader.quantization))
    return experts
