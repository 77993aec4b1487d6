"""EAGLE heads of random weights for any target.

For runs of the whole engine. `eagle_toy` has heads in every published layout, with a reference.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specray.models.registry import load_config


def write_random_head(
    folder: Path,
    target_folder: Path,
    version: int,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    window: int | None = None,
    is_parallel: bool = False,
) -> Path:
    """Write a head of EAGLE-`version`; an EAGLE-3 head can have its own draft vocabulary, and a mask (P-EAGLE)."""
    target = load_config(target_folder)
    size, head_dim, num_layers = target.hidden_size, 16, target.num_hidden_layers
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
    }
    if version == 3:
        config |= {
            "draft_vocab_size": draft_vocab_size,
            # Layer outputs: of the embedding, the middle and the last layer, which even the smallest target has.
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, num_layers // 2 - 1, num_layers - 1]},
        }
    if is_parallel:
        config |= {"parallel_drafting": True, "ptd_token_id": 3}
    if window is not None:
        config |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config, version, torch.Generator().manual_seed(seed)), folder / "model.safetensors")
    return folder


def _tensors(config: dict[str, object], version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size, dim, ffn = (int(str(config[name])) for name in ("hidden_size", "head_dim", "intermediate_size"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.7 * columns**-0.5

    def scale() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    width = size * (version - 1)
    tensors = {
        "fc.weight": matrix(size, version * size),
        "layers.0.self_attn.q_proj.weight": matrix(2 * dim, width),
        "layers.0.self_attn.k_proj.weight": matrix(dim, width),
        "layers.0.self_attn.v_proj.weight": matrix(dim, width),
        "layers.0.self_attn.o_proj.weight": matrix(size, 2 * dim),
        "layers.0.post_attention_layernorm.weight": scale(),
        "layers.0.mlp.gate_proj.weight": matrix(ffn, size),
        "layers.0.mlp.up_proj.weight": matrix(ffn, size),
        "layers.0.mlp.down_proj.weight": matrix(size, ffn),
    }
    if version == 3:
        tensors |= {name: scale() for name in ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")}
        tensors["norm.weight"] = scale()
        if "ptd_token_id" in config:
            tensors["mask_hidden"] = torch.randn(1, version * size, generator=generator)
        if (num_ids := config["draft_vocab_size"]) is not None:
            tensors |= _draft_vocabulary(int(str(config["vocab_size"])), int(str(num_ids)), generator)
            tensors["lm_head.weight"] = matrix(int(str(num_ids)), size)
    return tensors


def _draft_vocabulary(vocab_size: int, num_ids: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Any ids of the target; d2t holds each one's distance from its draft id."""
    ids = torch.randperm(vocab_size, generator=generator)[:num_ids].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(num_ids), "t2d": mask}
