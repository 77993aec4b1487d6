"""Llama's config.json.

transformers has a class for it, but its import reads much of torch's compiler, for two seconds in each process.
"""

from typing import Any

from transformers import PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "head_dim": None,
}


class LlamaConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # of a subclass, in transformers
    """The fields and defaults of `transformers.LlamaConfig`. Raises what its checks raise."""

    model_type = "llama"

    def __init__(self, **fields: Any) -> None:
        values = DEFAULTS | fields
        hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
        if values["head_dim"] is None:
            values["head_dim"] = hidden_size // num_heads
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = num_heads
        # The base class completes RoPE's parameters from the other fields.
        for name in DEFAULTS:
            setattr(self, name, values[name])
        del values["rope_parameters"]
        super().__init__(**values)
