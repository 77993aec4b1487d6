"""Quantised checkpoints, written with numpy from the definitions of their formats.

Sources: the model cards of DeepSeek-V3 (blocks of 128 x 128), AutoAWQ's and AutoGPTQ's descriptions of their tensors,
compressed-tensors' of its compressors. Nothing here is shared with the code that reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
E4M3_MAX = 448.0


class Quantised(NamedTuple):
    """The stored parts of a matrix by their suffix, and float64 [outs, ins] of what they stand for."""

    parts: Tensors
    weights: np.ndarray


class Method(NamedTuple):
    """A quantization_config and its quantiser."""

    config: dict[str, Any]
    quantise: Callable[[np.ndarray], Quantised]


def fp8(weights: np.ndarray, scales: np.ndarray, expanded: np.ndarray, suffix: str) -> Quantised:
    """`expanded` are the `scales` of each weight."""
    stored = torch.from_numpy(np.clip(weights / expanded, -E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)
    parts = {"weight": stored, suffix: torch.from_numpy(scales)}
    return Quantised(parts, stored.double().numpy() * expanded.astype(np.float64))


def fp8_blocks(weights: np.ndarray, block: int) -> Quantised:
    outs, ins = weights.shape
    scales = np.zeros((-(-outs // block), -(-ins // block)), np.float32)
    expanded = np.zeros((outs, ins), np.float32)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            inside = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
            scales[row, column] = np.abs(weights[inside]).max() / E4M3_MAX
            expanded[inside] = scales[row, column]
    return fp8(weights, scales, expanded, "weight_scale_inv")


def fp8_tensor(weights: np.ndarray) -> Quantised:
    scale = np.float32(np.abs(weights).max() / E4M3_MAX)
    done = fp8(weights, np.array([scale]), np.full(weights.shape, scale), "weight_scale")
    return done._replace(parts=done.parts | {"input_scale": torch.tensor([0.5])})


def fp8_rows(weights: np.ndarray) -> Quantised:
    scales = (np.abs(weights).max(1, keepdims=True) / E4M3_MAX).astype(np.float32)
    return fp8(weights, scales, np.broadcast_to(scales, weights.shape), "weight_scale")


def int8_rows(weights: np.ndarray) -> Quantised:
    scales = torch.from_numpy(np.abs(weights).max(1, keepdims=True) / 127).to(torch.bfloat16)
    stored = np.clip(np.rint(weights / scales.double().numpy()), -128, 127).astype(np.int8)
    parts = {"weight": torch.from_numpy(stored), "weight_scale": scales}
    return Quantised(parts, stored * scales.double().numpy())


class Grouped(NamedTuple):
    """Integers [outs, ins] with scales and zeros [outs, groups], and each input's group."""

    ints: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        scales, zeros = self.scales.astype(np.float64)[:, self.groups], self.zeros[:, self.groups]
        weights: np.ndarray = scales * (self.ints.astype(np.int64) - zeros)
        return weights


def grouped(weights: np.ndarray, bits: int, size: int, symmetric: bool, groups: np.ndarray | None = None) -> Grouped:
    """Rounded to `bits`; scales are float16 numbers."""
    outs, ins = weights.shape
    index = np.arange(ins) // size if groups is None else groups
    count, largest = int(index.max()) + 1, (1 << bits) - 1
    ints = np.zeros((outs, ins), np.int64)
    scales, zeros = np.zeros((outs, count), np.float16), np.zeros((outs, count), np.int64)
    for group in range(count):
        part = weights[:, index == group]
        if symmetric:
            scales[:, group] = 2 * np.abs(part).max(1) / largest
            zeros[:, group] = 1 << bits - 1
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / largest
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, largest)
        rounded = np.rint(part / scales[:, [group]].astype(np.float64)) + zeros[:, [group]]
        ints[:, index == group] = np.clip(rounded, 0, largest)
    return Grouped(ints, scales, zeros, index)


def pack(ints: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """int32 words of the columns of `ints` [n, m], the first of `order` in the lowest bits."""
    count = 32 // bits
    words = np.zeros((len(ints), ints.shape[1] // count), np.uint64)
    for place, column in enumerate(order or range(count)):
        words |= ints[:, column::count].astype(np.uint64) << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


def awq(weights: np.ndarray, size: int) -> Quantised:
    done, order = grouped(weights, 4, size, symmetric=False), [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": pack(done.ints.T, 4, order),
        "qzeros": pack(done.zeros.T, 4, order),
        "scales": done.scales.T,
    }
    return Quantised(_tensors(parts), done.weights)


def gptq(weights: np.ndarray, bits: int, size: int, symmetric: bool, shuffled: bool, offset: int) -> Quantised:
    """Zeros are stored less `offset`. `shuffled`: inputs of a group are not neighbours (desc_act)."""
    order = np.random.default_rng(3).permutation(weights.shape[1]) if shuffled else np.arange(weights.shape[1])
    index = np.empty_like(order)
    index[order] = np.arange(len(order)) // size
    done = grouped(weights, bits, size, symmetric, index)
    parts = {
        "qweight": pack(done.ints, bits).T,
        "qzeros": pack((done.zeros.T - offset) % (1 << bits), bits),
        "scales": done.scales.T,
        "g_idx": index.astype(np.int32),
    }
    return Quantised(_tensors(parts), done.weights)


def compressed_ints(weights: np.ndarray, bits: int, size: int, symmetric: bool) -> Quantised:
    done = grouped(weights, bits, size, symmetric)
    parts = {
        "weight_packed": pack(done.ints, bits),
        "weight_scale": done.scales,
        "weight_shape": np.array(weights.shape, np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack(done.zeros.T, bits).T
    return Quantised(_tensors(parts), done.weights)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    described = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": described, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq_config(bits: int, size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": True, **others}


_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
METHODS: dict[str, Method] = {
    "fp8 in blocks": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
        lambda weights: fp8_blocks(weights, 16),
    ),
    "fp8 of a tensor": Method({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fbgemm fp8": Method({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "compressed fp8": Method(_compressed("float-quantized", type="float", strategy="channel"), fp8_rows),
    "compressed int8": Method(_compressed("int-quantized", strategy="channel"), int8_rows),
    "compressed int4": Method(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16),
        lambda weights: compressed_ints(weights, 4, 16, symmetric=True),
    ),
    "compressed int4 with zeros": Method(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
        lambda weights: compressed_ints(weights, 4, 16, symmetric=False),
    ),
    "awq": Method(_AWQ | {"group_size": 16}, lambda weights: awq(weights, 16)),
    "awq of whole columns": Method(_AWQ | {"group_size": -1}, lambda weights: awq(weights, weights.shape[1])),
    "gptq": Method(_gptq_config(4, 16), lambda weights: gptq(weights, 4, 16, True, False, 1)),
    "gptq with zeros": Method(_gptq_config(4, 16, sym=False), lambda weights: gptq(weights, 4, 16, False, False, 1)),
    "gptq by activation": Method(
        _gptq_config(4, 16, sym=False, desc_act=True), lambda weights: gptq(weights, 4, 16, False, True, 1)
    ),
    "gptq, format 2": Method(
        _gptq_config(4, 16, sym=False, checkpoint_format="gptq_v2"),
        lambda weights: gptq(weights, 4, 16, False, False, 0),
    ),
    "gptq of 8 bits": Method(_gptq_config(8, 16), lambda weights: gptq(weights, 8, 16, True, False, 1)),
}


def published(group: int) -> dict[str, Method]:
    """Methods with blocks as published checkpoints have them, and groups of so many inputs."""
    return {
        "fp8 in blocks": Method(
            METHODS["fp8 in blocks"].config | {"weight_block_size": [128, 128]},
            lambda weights: fp8_blocks(weights, 128),
        ),
        "fp8 of a tensor": METHODS["fp8 of a tensor"],
        "fp8 of channels": METHODS["compressed fp8"],
        "awq": Method(_AWQ | {"group_size": group}, lambda weights: awq(weights, group)),
        "gptq": Method(_gptq_config(4, group), lambda weights: gptq(weights, 4, group, True, False, 1)),
        "gptq with zeros": Method(
            _gptq_config(4, group, sym=False), lambda weights: gptq(weights, 4, group, False, False, 1)
        ),
        "compressed int4": Method(
            _compressed("pack-quantized", num_bits=4, strategy="group", group_size=group),
            lambda weights: compressed_ints(weights, 4, group, symmetric=True),
        ),
    }


def quantise_model(source: Path, folder: Path, method: Method) -> Path:
    """Quantise the linear layers of the model in `source` into `folder`; the weights in `source` become theirs."""
    stored: Tensors = {}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            stored[name] = tensor
            continue
        done = method.quantise(tensor.numpy())
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in done.parts.items()}
        tensors[name] = torch.from_numpy(done.weights).to(tensor.dtype)
    save_file(tensors, source / "model.safetensors")
    folder.mkdir(exist_ok=True)
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method.config}))
    save_file(stored, folder / "model.safetensors")
    return folder


def _tensors(arrays: dict[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
