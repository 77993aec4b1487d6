"""Sizes of a Llama-like checkpoint, and which biases and norms its architecture has."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from specray.layers.parallel import RankGroup
from specray.models.target_model import ModelShape

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
        kv_heads = group.share(num_kv_heads)
        num_local_kv_heads = kv_heads.stop - kv_heads.start
        llama_bias = bool(getattr(config, "attention_bias", False)) and architecture not in _QKV_BIAS
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            num_local_heads=num_local_kv_heads * (num_heads // num_kv_heads),
            num_local_kv_heads=num_local_kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            ffn_size=config.intermediate_size,
            qkv_bias=llama_bias or architecture in _QKV_BIAS,
            output_bias=llama_bias,
            qk_norm=architecture in _QK_NORM,
        )

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads
