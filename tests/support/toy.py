"""Toy models: two layers of random weights in Hugging Face layout, and a float64 reference.

The reference is written in numpy from the definition of the architecture. It shares no code with the package or with
transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 64
BOS, EOS = 0, 1
CONTEXT = 256

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-rope": {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0},
    "tied": {"tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
}

_SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
_TEXT = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,!?é☃😀"
_PAIRS = ["th", "he", "in", "er", "an", "on", "or", "ar", "st", "le"]
_MERGES: list[tuple[str, str]] = [(pair[0], pair[1]) for pair in _PAIRS]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_toy(
    folder: Path, variant: str = "llama", seed: int = 0, vocab_size: int = VOCAB_SIZE, num_layers: int = 2
) -> Path:
    """A model folder of `variant` with weights drawn from `seed`; its logits differ by several units.

    The tokenizer has VOCAB_SIZE tokens; a larger `vocab_size` pads the embedding and the output matrix.
    """
    config = _BASE | VARIANTS[variant] | {"vocab_size": vocab_size, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, torch.Generator().manual_seed(seed)), folder / "model.safetensors")
    toy_tokenizer().save_pretrained(folder)
    return folder


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: bytes and a few pairs of letters. Characters beyond ASCII take two to four tokens."""
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = list(dict.fromkeys(symbol for char in _TEXT for symbol in bytewise.pre_tokenize_str(char)[0][0]))
    pieces = [*_SPECIALS, *symbols, *("".join(pair) for pair in _MERGES)]
    assert len(pieces) == VOCAB_SIZE
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=_MERGES))
    backend.pre_tokenizer = bytewise
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIALS])
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]


def oracle_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    """float64 [tokens, vocab]: row i are the logits after token_ids[: i + 1]."""
    config, weights = _read(folder)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    logits: np.ndarray = oracle_states(folder, token_ids)[-1] @ weights[head].T
    return logits


def oracle_states(folder: Path, token_ids: list[int]) -> list[np.ndarray]:
    """float64 [tokens, hidden] entering each layer; last, the output of the final norm."""
    config, weights = _read(folder)
    hidden = weights["model.embed_tokens.weight"][token_ids]
    entering = []
    for index in range(config["num_hidden_layers"]):
        entering.append(hidden)
        layer = {n.split(".", 3)[3]: t for n, t in weights.items() if n.startswith(f"model.layers.{index}.")}
        hidden = hidden + _attention(_norm(hidden, layer["input_layernorm.weight"], config), layer, config)
        hidden = hidden + _ffn(_norm(hidden, layer["post_attention_layernorm.weight"], config), layer)
    return [*entering, _norm(hidden, weights["model.norm.weight"], config)]


def oracle_greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(oracle_logits(folder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the weights in float64."""
    weights = load_file(folder / "model.safetensors")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config, {name: tensor.astype(np.float64) for name, tensor in weights.items()}


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape: int, spread: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    def scale(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    vocab = (config["vocab_size"], hidden)
    weights = {"model.embed_tokens.weight": normal(*vocab, spread=0.6), "model.norm.weight": scale(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(*vocab, spread=0.6)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": scale(hidden),
            "post_attention_layernorm.weight": scale(hidden),
            "self_attn.q_proj.weight": normal(q_size, hidden, spread=0.5),
            "self_attn.k_proj.weight": normal(kv_size, hidden, spread=0.5),
            "self_attn.v_proj.weight": normal(kv_size, hidden, spread=0.3),
            "self_attn.o_proj.weight": normal(hidden, q_size, spread=0.3),
            "mlp.gate_proj.weight": normal(ffn, hidden, spread=0.3),
            "mlp.up_proj.weight": normal(ffn, hidden, spread=0.3),
            "mlp.down_proj.weight": normal(hidden, ffn, spread=0.2),
        }
        if config["model_type"] == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": normal(q_size if n == "q" else kv_size, spread=0.5) for n in "qkv"}
        if config["model_type"] == "qwen3":
            layer |= {f"self_attn.{n}_norm.weight": scale(head_dim) for n in "qk"}
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return weights


def _norm(x: np.ndarray, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight
    return scaled


def _attention(x: np.ndarray, layer: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """Query head h reads KV head h // (heads / KV heads); token i sees tokens 0 … i, or the last of a window."""
    num_tokens, dim, fold = len(x), config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    q, k, v = ((x @ layer[f"self_attn.{n}_proj.weight"].T + layer.get(f"self_attn.{n}_proj.bias", 0)) for n in "qkv")
    q, k, v = (t.reshape(num_tokens, -1, dim) for t in (q, k, v))
    if "self_attn.q_norm.weight" in layer:
        q, k = (_norm(t, layer[f"self_attn.{n}_norm.weight"], config) for t, n in ((q, "q"), (k, "k")))
    q, k = _rotate(q, config), _rotate(k, config)
    out = np.zeros_like(q)
    window = config["sliding_window"] if "sliding_attention" in config.get("layer_types", []) else num_tokens
    for i in range(num_tokens):
        seen = slice(max(0, i + 1 - window), i + 1)
        for head in range(config["num_attention_heads"]):
            scores = k[seen, head // fold] @ q[i, head] / np.sqrt(dim)
            probs = np.exp(scores - scores.max())
            out[i, head] = probs / probs.sum() @ v[seen, head // fold]
    joined: np.ndarray = out.reshape(num_tokens, -1) @ layer["self_attn.o_proj.weight"].T
    return joined


def _rotate(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Components j and j + dim/2 form a complex number, rotated by position * frequency j."""
    half = config["head_dim"] // 2
    frequencies, scale = config["rope_theta"] ** (-np.arange(half) / half), 1.0
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        frequencies = np.array([_llama3(f, scaling) for f in frequencies])
    if scaling.get("rope_type") == "yarn":
        frequencies, scale = _yarn(frequencies, config["rope_theta"], scaling)
    turn = scale * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate((turned.real, turned.imag), -1)


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(share * frequency + (1 - share) * frequency / scaling["factor"])


def _yarn(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """(frequencies, scale of queries and keys): as above, with linear interpolation between two pairs."""
    half, original = len(frequencies), scaling["original_max_position_embeddings"]
    low, high = (
        half * np.log(original / (turns * 2 * np.pi)) / np.log(theta)
        for turns in (scaling["beta_fast"], scaling["beta_slow"])
    )
    low, high = max(low, 0), min(high, 2 * half - 1)  # neither is rounded: `truncate` is false
    share = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    scale = 0.1 * np.log(scaling["factor"]) + 1
    return frequencies * (1 - share) + frequencies / scaling["factor"] * share, float(scale)


def _ffn(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    gate = x @ layer["mlp.gate_proj.weight"].T
    out: np.ndarray = gate / (1 + np.exp(-gate)) * (x @ layer["mlp.up_proj.weight"].T) @ layer["mlp.down_proj.weight"].T
    return out
