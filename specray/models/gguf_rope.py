"""Rotary positions of a GGUF file as transformers' `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specray.models.gguf_reader import GgufFile, unusable

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_KEYS = {"dimension_count", "dimension_count_swa", "freq_base", "freq_base_swa", "scale_linear"}
_KEYS |= {"scaling.type", "scaling.factor", "scaling.attn_factor", "scaling.original_context_length"}
_KEYS |= {f"scaling.yarn_{part}" for part in ("beta_fast", "beta_slow", "attn_factor", "log_multiplier")}
_KEYS |= {"scaling.finetuned"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(file: GgufFile, name: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a file of architecture `name`; `own` are the defaults of its configuration class.

    ConfigError for a scaling that is not supported.
    """
    _check_keys(file, f"{name}.rope.")
    by_kind = "full_attention" in own  # of layer
    usual = own["full_attention"] if by_kind else own
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = file.need(f"{name}.rope.dimension_count", int, head_dim)
    theta = file.need(f"{name}.rope.freq_base", float, 10_000.0)
    parameters = {"rope_theta": theta, **_scaling(file, name, theta, rotated, config)}
    if rotated != head_dim or "partial_rotary_factor" in usual:
        parameters["partial_rotary_factor"] = rotated / head_dim
    if "truncate" in usual:  # where YaRN's ramp begins and ends; GPT-OSS does not round
        parameters["truncate"] = usual["truncate"]
    if not by_kind:
        return parameters
    local = file.need(f"{name}.rope.freq_base_swa", float, own["sliding_attention"]["rope_theta"])
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _check_keys(file: GgufFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS and value:
            raise unusable(file.path, f"{key}={value!r} is not supported")


def _scaling(file: GgufFile, name: str, theta: float, rotated: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type` and its settings, for heads of which `rotated` numbers are rotated."""
    prefix = f"{name}.rope.scaling"
    if FREQUENCIES in file.tensors:
        return _llama3(file, theta, rotated)
    if LONG in file.tensors:
        return _longrope(file, prefix, config)
    factor = file.get(f"{prefix}.factor", float) or file.get(f"{name}.rope.scale_linear", float) or 1.0
    kind = file.get(f"{prefix}.type", str, "none" if factor == 1.0 else "linear")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = file.need(f"{prefix}.original_context_length", int, config["max_position_embeddings"])
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": file.need(f"{prefix}.yarn_beta_fast", float, 32.0),
            "beta_slow": file.need(f"{prefix}.yarn_beta_slow", float, 1.0),
            **_attention_factor(file, name, factor),
        }
    raise unusable(file.path, f"{prefix}.type={kind!r} is not supported (none, linear, yarn)")


def _attention_factor(file: GgufFile, name: str, factor: float) -> dict[str, float]:
    """What YaRN multiplies queries and keys by."""
    prefix = f"{name}.rope.scaling"
    found: dict[str, float] = {}
    if name == "mistral3":
        found["llama_4_scaling_beta"] = file.get(f"{name}.attention.temperature_scale", float) or 0.0
    elif file.metadata.get(f"{name}.attention.temperature_scale"):
        raise unusable(file.path, f"{name}.attention.temperature_scale is not supported")
    multiplier = file.get(f"{prefix}.yarn_log_multiplier", float) or 0.0
    if multiplier:  # DeepSeek's is written a tenth as large, and its two factors are equal
        all_dim = round(multiplier * (10.0 if name == "deepseek2" else 1.0), 6)
        return {**found, "mscale": all_dim if name == "deepseek2" else 1.0, "mscale_all_dim": all_dim}
    # llama.cpp multiplies the factor that follows from the scaling, transformers replaces it.
    usual = file.get(f"{prefix}.attn_factor", float, 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return {**found, "attention_factor": file.get(f"{prefix}.yarn_attn_factor", float, usual)}


def _longrope(file: GgufFile, prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    original = file.need(f"{prefix}.original_context_length", int)
    parameters = {
        "rope_type": "longrope",
        "factor": config["max_position_embeddings"] / original,
        "original_max_position_embeddings": original,
        "long_factor": file.floats(LONG).tolist(),
        "short_factor": file.floats(SHORT).tolist() if SHORT in file.tensors else None,
    }
    attention_factor = file.get(f"{prefix}.attn_factor", float)
    return parameters if attention_factor is None else parameters | {"attention_factor": attention_factor}


def _llama3(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3.1's RoPE parameters, recovered from the frequency divisors that llama.cpp stores instead."""
    stored = file.floats(FREQUENCIES)
    factor = float(stored.max())
    low, high, original = _LLAMA3.values()
    waves = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise unusable(file.path, f"its {FREQUENCIES} is not Llama 3.1's scaling, the only one supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
