"""Sizes of a Llama-like checkpoint, and which biases and norms its architecture has."""

import logging
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.target_model import ModelShape

logger = logging.getLogger(__name__)

_QKV_BIAS = ("Qwen2ForCausalLM", "MiMoForCausalLM")  # q, k and v have a bias, whatever attention_bias says
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class LlamaShape(ModelShape):
    """Sizes of a checkpoint with grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    ffn_size: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: PretrainedConfig, group: RankGroup) -> "LlamaShape":
        architecture = (config.architectures or ["LlamaForCausalLM"])[0]
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        heads, kv_heads = heads_of_rank(num_heads, num_kv_heads, group)
        llama_bias = bool(getattr(config, "attention_bias", False)) and architecture not in _QKV_BIAS
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            num_local_heads=heads.stop - heads.start,
            num_local_kv_heads=kv_heads.stop - kv_heads.start,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            ffn_size=config.intermediate_size,
            qkv_bias=llama_bias or architecture in _QKV_BIAS,
            output_bias=llama_bias,
            qk_norm=architecture in _QK_NORM,
        )


def heads_of_rank(num_heads: int, num_kv_heads: int, group: RankGroup) -> tuple[slice, slice]:
    """A rank's query heads and KV heads.

    Ranks have whole groups of heads, which need not divide evenly. With more ranks than KV heads, as many ranks have
    the same KV head, each with a part of its query heads, as in Megatron-LM and vLLM.
    """
    heads_per_group = num_heads // num_kv_heads
    if group.size <= num_kv_heads:
        return group.share(num_kv_heads, heads_per_group), group.share(num_kv_heads)
    head = group.rank * num_kv_heads // group.size
    return group.share(num_heads), slice(head, head + 1)


def ranks_of_layers(num_heads: int, num_kv_heads: int, group: RankGroup, folder: Path) -> RankGroup:
    """The ranks that share the layers of the draft head in `folder`: `group`, or a rank alone if they cannot.

    Each rank then has them whole.
    """
    try:
        check_heads(num_heads, num_kv_heads, group.size)
    except ConfigError as error:
        logger.warning("%s is whole on every rank: %s", folder, error)
        return RankGroup()
    return group


def check_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> None:
    """ConfigError if `tp_size` ranks cannot share the heads."""
    sizes = range(num_kv_heads + 1, num_heads + 1)
    larger = [size for size in sizes if size % num_kv_heads == 0 and num_heads % size == 0]
    if tp_size <= num_kv_heads or tp_size in larger:
        return
    raise ConfigError(
        f"tp_size={tp_size} cannot share {num_heads} query heads and {num_kv_heads} KV heads; "
        f"set tp_size to {' or '.join(map(str, [f'at most {num_kv_heads}', *larger]))}"
    )
