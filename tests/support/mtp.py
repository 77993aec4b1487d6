"""MTP layers of random weights, and references: numpy in float64 for MiMo's, transformers for DeepSeek's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

from specray.models.registry import load_config
from tests.support.architectures import spread, write_architecture

_MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,  # in training; the tables are as long as the target's
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "attention_bias": True,
    "use_sliding_window": False,
}


def write_mimo_layers(folder: Path, target_folder: Path, num_layers: int = 1, seed: int = 0) -> Path:
    """A folder with nothing but MTP layers, as `specray train mtp` writes it."""
    target = load_config(target_folder)
    sizes = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.num_hidden_layers,
        "num_nextn_predict_layers": num_layers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MIMO | sizes))
    generator = torch.Generator().manual_seed(seed)
    layers = [mimo_tensors(index, target.hidden_size, generator) for index in range(num_layers)]
    save_file({name: tensor for layer in layers for name, tensor in layer.items()}, folder / "model.safetensors")
    return folder


def mimo_tensors(index: int, hidden: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    heads, kv, ffn = (_MIMO[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    dim = _MIMO["head_dim"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    layer = {f"{name}.weight": 1 + 0.3 * torch.randn(hidden, generator=generator) for name in norms}
    layer |= {
        "input_proj.weight": normal(hidden, 2 * hidden),
        "self_attn.q_proj.weight": normal(heads * dim, hidden),
        "self_attn.k_proj.weight": normal(kv * dim, hidden),
        "self_attn.v_proj.weight": normal(kv * dim, hidden),
        "self_attn.o_proj.weight": normal(hidden, heads * dim),
        "self_attn.q_proj.bias": normal(heads * dim),
        "self_attn.k_proj.bias": normal(kv * dim),
        "self_attn.v_proj.bias": normal(kv * dim),
        "mlp.gate_proj.weight": normal(ffn, hidden),
        "mlp.up_proj.weight": normal(ffn, hidden),
        "mlp.down_proj.weight": normal(hidden, ffn),
    }
    return {f"model.mtp_layers.{index}.{name}": tensor for name, tensor in layer.items()}


def write_deepseek(folder: Path, num_layers: int = 1) -> MtpModel:
    """A DeepSeek-V3 target with MTP layers; returns transformers' model of these."""
    main = write_architecture("deepseek-v3", folder)
    layers = MtpModel(main, num_layers).float().eval()
    first = main.config.num_hidden_layers
    tensors = load_tensors(folder / "model.safetensors")
    for name, tensor in [*layers.layers.named_parameters(), *layers.layers.named_buffers()]:
        spread(name, tensor)
        number, _, rest = name.partition(".")
        stored = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors |= {
            f"model.layers.{first + int(number)}.{part}": value.clone() for part, value in _hub_names(stored, tensor)
        }
    for number in range(num_layers):  # copies in checkpoints that must not be read; these are wrong
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.{first + number}.{name}.weight"] = torch.zeros(main.config.vocab_size, 32)
    save_file(tensors, folder / "model.safetensors")
    return layers


def _hub_names(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """One of transformers' tensors as in checkpoints, with one tensor per expert."""
    found = []
    for index, expert in enumerate(tensor if ".experts." in name else ()):
        if "gate_up" in name:
            for part, half in zip(("gate", "up"), expert.chunk(2), strict=True):
                found.append((f"mlp.experts.{index}.{part}_proj.weight", half))
        else:
            found.append((f"mlp.experts.{index}.down_proj.weight", expert))
    return found or [(name, tensor)]


def mimo_states(folder: Path, layer: int, embeds: np.ndarray, states: np.ndarray) -> np.ndarray:
    """A layer's output states [n, hidden] for embeddings and states [n, hidden] at positions 0 … n - 1."""
    config = json.loads((folder / "config.json").read_text())
    prefix = f"model.mtp_layers.{layer}."
    w = {
        name.removeprefix(prefix): tensor.astype(np.float64)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(prefix)
    }

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]
        return scaled

    embeds = embeds.copy()
    embeds[0] = 0.0
    pair = norm(states, "hidden_layernorm"), norm(embeds, "token_layernorm")
    x = np.concatenate(pair, -1) @ w["input_proj.weight"].T
    x = x + _attention(norm(x, "input_layernorm"), w, config)
    y = norm(x, "post_attention_layernorm")
    gate = y @ w["mlp.gate_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, "final_layernorm")


def _attention(x: np.ndarray, w: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    dim, fold = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    q, k, v = (
        (x @ w[f"self_attn.{n}_proj.weight"].T + w[f"self_attn.{n}_proj.bias"]).reshape(len(x), -1, dim) for n in "qkv"
    )
    frequencies = config["rope_theta"] ** (-np.arange(dim // 2) / (dim // 2))
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    q, k = (_turned(t, turn) for t in (q, k))
    out = np.zeros_like(q)
    for i in range(len(x)):
        for head in range(q.shape[1]):
            scores = k[: i + 1, head // fold] @ q[i, head] / np.sqrt(dim)
            probs = np.exp(scores - scores.max())
            out[i, head] = probs / probs.sum() @ v[: i + 1, head // fold]
    joined: np.ndarray = out.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T
    return joined


def _turned(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate((turned.real, turned.imag), -1)
