"""`quantization_config` of a checkpoint: which methods are read, and by which names their parts are stored.

Weights alone are read as quantised. Scales of activations are ignored, because they have the type that the engine is
configured for; so are those of the KV cache, unless that is in float8.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specray.errors import ConfigError
from specray.models.quantized_matrices import IntMatrix, Mxfp4Experts, ScaledMatrix, StoredMatrix, WordLayout, damaged

Get = Callable[[str], Tensor]  # a stored tensor by name

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_IGNORED = (".input_scale", ".activation_scale", ".output_scale", ".q_scale", *KV_SCALES)
_SEQUENTIAL = {4: tuple(range(8)), 8: tuple(range(4))}  # by bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Format(Protocol):
    """How the matrices of a checkpoint are stored."""

    def parts(self, stored: Collection[str]) -> dict[str, list[str]]:
        """The stored tensors of each quantised matrix, by its name."""

    def matrix(self, name: str, parts: list[str], get: Get) -> StoredMatrix:
        """Matrix `name`. ConfigError if its parts do not fit."""


class Names(NamedTuple):
    """The names of a checkpoint with its quantised matrices as if they were stored whole."""

    plain: frozenset[str]
    parts: dict[str, list[str]]

    @classmethod
    def of(cls, form: Format | None, stored: Collection[str]) -> "Names":
        parts = {} if form is None else form.parts(stored)
        hidden = {name for names in parts.values() for name in names}
        if form is not None:
            hidden |= {name for name in stored if name.endswith(_IGNORED)}
        return cls(frozenset(stored) - hidden, parts)


def checkpoint_format(folder: Path) -> Format | None:
    """The format that config.json in `folder` states; None: none. ConfigError for one that is not supported."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the reader of the rest of the file describes the problem
    if not isinstance(content, dict):
        return None
    text = content.get("text_config")
    settings = content.get("quantization_config") or content.get("compression_config")
    if not settings and isinstance(text, dict):  # of an image model, as Kimi-K2.5's
        settings = text.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: quantization_config={settings!r} is not an object; fetch the file again")
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise ConfigError(
            f"{path}: the checkpoint is quantised with quant_method={method}, which is not supported; choose one of "
            f"{', '.join(_METHODS)}, or a checkpoint in bfloat16, float16 or float32"
        )
    return _METHODS[method](_Settings(path, method, settings))


@dataclass(frozen=True, slots=True)
class _Settings:
    """The fields of a quantization_config."""

    path: Path
    method: str
    fields: Mapping[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is set."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), default)

    def one_of(self, value: object, field: str, known: Collection[object]) -> Any:
        """`value` of a field. ConfigError if it is not one that this code reads."""
        if isinstance(value, (dict, list, float)) or value not in known:
            raise ConfigError(
                f"{self.path}: the checkpoint is quantised with {self.method} and {field}={value!r}, which is not "
                f"supported (only {', '.join(map(str, known))}); choose another checkpoint"
            )
        return value

    def section(self, field: str) -> dict[str, Any]:
        """A field with fields of its own; empty if it is not set. ConfigError if it is something else."""
        value = self.get(field, default={})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {field}={value!r} of quantization_config is not an object")
        return value

    def size(self, value: object, field: str) -> int:
        """A number of weights above zero, or -1 for all. ConfigError if it is something else."""
        if type(value) is not int or (value < 1 and value != -1):
            raise ConfigError(f"{self.path}: {field}={value!r} of quantization_config is not a number of weights")
        return value


@dataclass(frozen=True, slots=True)
class _Scaled:
    """`*.weight` in one byte each, beside a tensor of scales."""

    block: tuple[int, int] | None

    def parts(self, stored: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for scales in stored:
            prefix, dot, part = scales.rpartition(".")
            name = f"{prefix}.weight"
            if dot and part in ("weight_scale", "weight_scale_inv") and name in stored:
                if name in found:
                    raise damaged(name, f"has scales under two names, {found[name][1]} and {scales}")
                found[name] = [name, scales]
        return found

    def matrix(self, name: str, parts: list[str], get: Get) -> StoredMatrix:
        weight, scales = (get(part) for part in parts)
        return ScaledMatrix.of(name, weight, scales, self.block)


@dataclass(frozen=True, slots=True)
class _Packed:
    """`*.qweight`, `*.qzeros` and `*.scales` of AWQ and GPTQ, with inputs first, and GPTQ's `*.g_idx`."""

    layout: WordLayout
    group_size: int

    def parts(self, stored: Collection[str]) -> dict[str, list[str]]:
        return _parts_of(stored, "qweight", ["qweight", "qzeros", "scales"], ["g_idx"])

    def matrix(self, name: str, parts: list[str], get: Get) -> StoredMatrix:
        words, zeros, scales, *order = (get(part) for part in parts)
        return IntMatrix.of(name, self.layout, words, zeros, scales, order[0] if order else self.group_size)


@dataclass(frozen=True, slots=True)
class _PackedOutputsFirst:
    """`*.weight_packed` and `*.weight_scale` of compressed-tensors, which are those of GPTQ transposed."""

    layout: WordLayout
    group_size: int
    symmetric: bool

    def parts(self, stored: Collection[str]) -> dict[str, list[str]]:
        zeros = [] if self.symmetric else ["weight_zero_point"]
        return _parts_of(
            stored, "weight_packed", ["weight_packed", "weight_scale", *zeros], ["weight_g_idx", "weight_shape"]
        )

    def matrix(self, name: str, parts: list[str], get: Get) -> StoredMatrix:
        tensors = {part.rpartition(".")[2]: get(part) for part in parts}
        words, scales = tensors["weight_packed"].t(), tensors["weight_scale"].t()
        zeros = None if self.symmetric else tensors["weight_zero_point"].t()
        return IntMatrix.of(name, self.layout, words, zeros, scales, tensors.get("weight_g_idx", self.group_size))


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """`*_blocks` and `*_scales` of gpt-oss."""

    def parts(self, stored: Collection[str]) -> dict[str, list[str]]:
        names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        return {name: [f"{name}_blocks", f"{name}_scales"] for name in names}

    def matrix(self, name: str, parts: list[str], get: Get) -> StoredMatrix:
        blocks, scales = (get(part) for part in parts)
        return Mxfp4Experts.of(name, blocks, scales)


def _parts_of(stored: Collection[str], marker: str, needed: list[str], optional: list[str]) -> dict[str, list[str]]:
    """The parts of every matrix that has a tensor *.`marker`; optional parts only where they are stored."""
    prefixes = [name.removesuffix(f".{marker}") for name in stored if name.endswith(f".{marker}")]
    return {
        f"{prefix}.weight": [f"{prefix}.{part}" for part in needed]
        + [f"{prefix}.{part}" for part in optional if f"{prefix}.{part}" in stored]
        for prefix in prefixes
    }


def _awq(settings: _Settings) -> Format:
    settings.one_of(settings.get("bits", "w_bit", default=4), "bits", (4,))
    settings.one_of(str(settings.get("version", default="gemm")).lower(), "version", ("gemm",))
    settings.one_of(settings.get("backend", default="autoawq"), "backend", ("autoawq",))
    layout = WordLayout(4, _AWQ_ORDER, packs_inputs=False, zero_offset=0)
    return _Packed(layout, settings.size(settings.get("group_size", "q_group_size", default=128), "group_size"))


def _gptq(settings: _Settings) -> Format:
    bits = settings.one_of(settings.get("bits"), "bits", (4, 8))
    form = settings.get("checkpoint_format", "format", default="gptq") or "gptq"
    settings.one_of(form, "checkpoint_format", ("gptq", "gptq_v2"))
    settings.one_of(settings.get("is_marlin_format", default=False), "is_marlin_format", (False,))
    for rule, change in settings.section("dynamic").items():
        if not rule.startswith("-:"):  # which leaves modules unquantised
            settings.one_of(change, f"dynamic[{rule!r}]", ())
    # The first format stores each zero less one.
    layout = WordLayout(bits, _SEQUENTIAL[bits], packs_inputs=True, zero_offset=int(form == "gptq"))
    return _Packed(layout, settings.size(settings.get("group_size", default=128), "group_size"))


def _fp8(settings: _Settings) -> Format:
    settings.one_of(settings.get("fmt", default="e4m3"), "fmt", ("e4m3", "float8_e4m3fn"))
    return _Scaled(_block(settings, settings.get("weight_block_size")))


def _fbgemm_fp8(settings: _Settings) -> Format:  # noqa: ARG001
    return _Scaled(None)


def _mxfp4(settings: _Settings) -> Format:  # noqa: ARG001
    return _Mxfp4()


def _compressed_tensors(settings: _Settings) -> Format:
    form = settings.get("format", default="dense")
    settings.one_of(form, "format", ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"))
    sparsity = _Settings(settings.path, settings.method, settings.section("sparsity_config"))
    settings.one_of(sparsity.get("format", default="dense"), "sparsity_config.format", ("dense",))
    groups = list(settings.section("config_groups").values())
    if len(groups) != 1 or not isinstance(groups[0], dict):
        raise ConfigError(f"{settings.path}: config_groups of quantization_config has not one group, as is supported")
    group = _Settings(settings.path, settings.method, groups[0])
    weights = _Settings(settings.path, settings.method, group.section("weights"))
    strategy = weights.get("strategy", default="tensor")
    if form == "pack-quantized":
        settings.one_of(strategy, "strategy", ("group", "channel"))
        bits = weights.one_of(weights.get("num_bits"), "num_bits", (4, 8))
        size = weights.get("group_size", default=-1) if strategy == "group" else -1
        layout = WordLayout(bits, _SEQUENTIAL[bits], packs_inputs=True, zero_offset=0)
        return _PackedOutputsFirst(
            layout, weights.size(size, "group_size"), bool(weights.get("symmetric", default=True))
        )
    settings.one_of(strategy, "strategy", ("tensor", "channel", "block"))
    weights.one_of(weights.get("symmetric", default=True), "symmetric", (True,))
    weights.one_of(weights.get("num_bits"), "num_bits", (8,))
    return _Scaled(_block(settings, weights.get("block_structure")) if strategy == "block" else None)


def _block(settings: _Settings, sizes: object) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{settings.path}: blocks of {sizes!r} weights are not two sizes; fetch the file again")
    return sizes[0], sizes[1]


_METHODS: dict[str, Callable[[_Settings], Format]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}
