"""Small random decoders as GGUF files, written as llama.cpp's `conversion/*.py` writes them.

One line for each: a decoder of `tests.support.decoders`, the name of its architecture in files, and what its
configuration has otherwise. What the converter does to tensors is written here once more, from its source.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from tests.support.decoders import write_decoder
from tests.support.gguf_toy import add_key, add_tokenizer, finish
from tests.support.toy import VOCAB_SIZE


class Decoder(NamedTuple):
    arch: str
    changes: dict[str, Any] = {}  # noqa: RUF012  # never changed
    """Of the configuration: files have no key for some settings, or only one value."""
    keys: dict[str, Any] = {}  # noqa: RUF012
    """Keys that the converter writes for this architecture alone."""


_TIED = {"tie_word_embeddings": True}
_PERIODIC = {"layer_types": None, "num_hidden_layers": 4}
_SIGMOID = {"expert_gating_func": 2}
GGUF_DECODERS: dict[str, Decoder] = {
    "llama": Decoder("llama"),
    "mixtral": Decoder("llama"),
    "ministral3": Decoder("mistral3", keys={"attention.temperature_scale": 0.1}),
    "llama4": Decoder("llama4", keys={"interleave_moe_layer_step": 1, "expert_feed_forward_length": 48}),
    "arcee": Decoder("arcee"),
    "smollm3": Decoder("smollm3", {"no_rope_layer_interval": 4}),
    "qwen2": Decoder("qwen2"),
    "qwen2_moe": Decoder("qwen2moe"),
    "qwen3": Decoder("qwen3"),
    "qwen3_moe": Decoder("qwen3moe", {"norm_topk_prob": True}),
    "gemma": Decoder("gemma", _TIED),
    "gemma2": Decoder("gemma2", _TIED | {"query_pre_attn_scalar": 8}),
    "gemma3": Decoder("gemma3", {"query_pre_attn_scalar": 8, "layer_types": None, "num_hidden_layers": 6}),
    "gpt_oss": Decoder("gpt-oss", _PERIODIC, {"expert_feed_forward_length": 48}),
    "phi": Decoder("phi2", {"num_key_value_heads": 4}),
    "phi3": Decoder("phi3"),
    "granite": Decoder("granite"),
    "granitemoe": Decoder("granitemoe"),
    "granitemoeshared": Decoder("granitemoe"),
    "glm4": Decoder("glm4"),
    "glm4_moe": Decoder("glm4moe", {"use_qk_norm": True}, _SIGMOID | {"nextn_predict_layers": 1, "block_count": 3}),
    "deepseek_v2": Decoder("deepseek2"),
    "deepseek_v3": Decoder("deepseek2", keys=_SIGMOID),
    "dots1": Decoder("dots1", {"sliding_window": None, "layer_types": None}, _SIGMOID),
    "olmo": Decoder("olmo", keys={"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": Decoder("olmo2"),
    "olmo3": Decoder("olmo2"),
    "olmoe": Decoder("olmoe"),
    "cohere": Decoder("command-r", _TIED),
    "cohere2": Decoder("cohere2", _TIED | _PERIODIC),
    "ernie4_5": Decoder("ernie4_5"),
    "ernie4_5_moe": Decoder("ernie4_5-moe"),
    "seed_oss": Decoder("seed_oss"),
    "hunyuan_v1_dense": Decoder("hunyuan-dense"),
    "exaone4": Decoder("exaone4"),
    "exaone_moe": Decoder("exaone-moe", keys=_SIGMOID),
    "nemotron": Decoder("nemotron"),
    "starcoder2": Decoder("starcoder2"),
    "stablelm": Decoder("stablelm", keys={"use_parallel_residual": False}),
    "jais2": Decoder("jais2"),
}
# Names of fields of configurations by key, as in TextModel.set_gguf_parameters and its subclasses.
_KEYS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
}
_PERMUTED = ("llama", "mistral3", "arcee", "smollm3", "granite", "granitemoe", "olmo")
_NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")


def write_gguf_decoder(
    name: str, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **changes: Any
) -> PreTrainedModel:
    """Write a file, whose matrices have `kind` where it fits; returns transformers' model with unrounded weights."""
    decoder = GGUF_DECODERS[name]
    folder = path.with_suffix("")
    model = write_decoder(name, folder, **decoder.changes | changes)
    writer = gguf.GGUFWriter(path, decoder.arch)
    add_tokenizer(writer, VOCAB_SIZE)
    for key, value in (_metadata(model.config, decoder.arch) | decoder.keys).items():
        add_key(writer, f"{decoder.arch}.{key}", value)
    for tensor, values in _converted(decoder.arch, model.config, load_file(folder / "model.safetensors")):
        fits = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "gate_inp" not in tensor
        stored = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    finish(writer)
    return model


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    known = {field.name for field in fields(type(config))}
    values = {name: getattr(config, name) for name in known}
    found: dict[str, Any] = {"block_count": config.num_hidden_layers}
    for key, names in _KEYS.items():
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if value is not None:
            found[key] = value
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = values["rope_parameters"]
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    found["rope.freq_base"] = float(rope["rope_theta"])
    if local is not None:
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if "partial_rotary_factor" in rope:
        found["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
        }
    if rope["rope_type"] == "longrope":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] * (0.1 if arch == "deepseek2" else 1.0)
    if arch in ("olmo2", "exaone4", "exaone-moe") and "layer_types" in values and values.get("sliding_window"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in values["layer_types"]]
    if arch == "deepseek2":
        rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
        found |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
        found["attention.key_length_mla"] = config.qk_nope_head_dim + rotated
        found |= {"attention.value_length_mla": config.v_head_dim, "rope.dimension_count": rotated}
    return found


def _converted(arch: str, config: Any, tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, values) of a checkpoint's tensors."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for key in ("long_factor", "short_factor"):
        if key in config.rope_parameters:
            yield f"rope_factors_{key.partition('_')[0]}.weight", np.array(config.rope_parameters[key], np.float32)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.search(r"experts\.(\d+)\.", name)
        if match:
            experts.setdefault(name.replace(match[0], "experts."), {})[int(match[1])] = values
    stacked = {name: np.stack([parts[index] for index in range(len(parts))]) for name, parts in experts.items()}
    for name, values in (*tensors.items(), *stacked.items()):
        if not re.search(r"experts\.\d+\.", name):
            for part, changed in _modified(arch, config, name, values):
                yield _file_name(names, part), changed


def _file_name(names: gguf.TensorNameMap, name: str) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name + ".weight" if "sinks" in name else name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _modified(arch: str, config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What modify_tensors of the converter's class for `arch` gives."""
    if arch in _PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        yield name, values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    elif arch in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
        yield name, values + 1
    elif arch == "deepseek2" and "kv_b_proj" in name:
        rows = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        keys, other = rows[:, : config.qk_nope_head_dim], rows[:, config.qk_nope_head_dim :]
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), other
    elif arch == "gpt-oss" and "experts.gate_up_proj" in name:
        end = ".bias" if name.endswith("_bias") else ".weight"
        rows = values if end == ".bias" else values.swapaxes(1, 2)
        for place, part in enumerate(("gate_proj", "up_proj")):
            yield name.removesuffix("_bias").replace("gate_up_proj", part) + end, rows[:, place::2]
    elif arch == "gpt-oss" and name.endswith("experts.down_proj_bias"):
        yield name.removesuffix("_bias") + ".bias", values
    elif arch in ("gpt-oss", "llama4") and name.endswith("experts.down_proj"):
        yield name + ".weight", values.swapaxes(1, 2)
    elif arch == "llama4" and name.endswith("experts.gate_up_proj"):
        for part, rows in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=-1), strict=True):
            yield name.replace("gate_up_proj", part) + ".weight", rows.swapaxes(1, 2)
    elif name.endswith("input_linear.weight"):  # Granite's
        prefix = name.partition("block_sparse_moe")[0].partition("shared_mlp")[0]
        for part, rows in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            kind = "mlp.shared_experts" if "shared_mlp" in name else "mlp.experts"
            yield f"{prefix}{kind}.{part}_proj.weight", rows
    else:
        yield name, values
