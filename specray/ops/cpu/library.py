"""The compiled kernels as Python functions, or None where they are switched off or cannot be compiled."""

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from specray.ops.cpu.build import BuildError, build

logger = logging.getLogger(__name__)

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `Kind` in matrix.h
GROUP = 32  # activations that share a scale


class Matrix(ctypes.Structure):
    """`Matrix` in matrix.h."""

    _fields_ = (
        ("kind", c_int32),
        ("outs", c_int32),
        ("ins", c_int32),
        ("zero", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Pool(ctypes.Structure):
    """`Pool` in attention.h."""

    _fields_ = (("data", c_void_p), ("type", c_int32), ("num_heads", c_int32), ("dim", c_int32))


class Requests(ctypes.Structure):
    """`Requests` in attention.h."""

    _fields_ = (
        ("count", c_int32),
        ("slots_width", c_int32),
        ("mask_rows", c_int32),
        ("mask_columns", c_int32),
        ("window", c_int32),
        ("query_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("tree_sizes", c_void_p),
        ("kv_slots", c_void_p),
        ("tree_mask", c_void_p),
    )


class Layer(ctypes.Structure):
    """`Layer` in layers.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Sizes(ctypes.Structure):
    """`Sizes` in layers.h."""

    _fields_ = (
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("eps", c_float),
    )


class Step(ctypes.Structure):
    """`Step` in layers.h."""

    _fields_ = (
        ("count", c_int64),
        ("positions", c_void_p),
        ("written", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("requests", Requests),
        ("pool", Pool),
        ("layer_bytes", c_int64),
    )


class EmbedAndHead(ctypes.Structure):
    """`EmbedAndHead` in layers.h."""

    _fields_ = (
        ("embedding", c_void_p),
        ("embedding_type", c_int32),
        ("num_columns", c_int32),
        ("norm", c_void_p),
        ("output", Matrix),
    )


class DraftNetwork(ctypes.Structure):
    """`DraftNetwork` in trees.h."""

    _fields_ = (
        ("embedding", c_void_p),
        ("embedding_type", c_int32),
        ("vocab_size", c_int32),
        ("token_norm", c_void_p),
        ("state_norm", c_void_p),
        ("project", Matrix),
        ("reads_states", c_int32),
        ("state_first", c_int32),
        ("residual_is_normed", c_int32),
        ("num_layers", c_int32),
        ("layers", c_void_p),
        ("sizes", Sizes),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("state_is_normed", c_int32),
        ("output_is_normed", c_int32),
        ("num_columns", c_int32),
        ("output", Matrix),
        ("target_ids", c_void_p),
    )


class Growth(ctypes.Structure):
    """`Growth` in trees.h."""

    _fields_ = (
        ("num_trees", c_int32),
        ("topk", c_int32),
        ("num_levels", c_int32),
        ("num_drafts", c_int32),
        ("output", c_void_p),
        ("roots", c_void_p),
        ("positions", c_void_p),
        ("last_position", c_int64),
        ("kv_slots", c_void_p),
        ("kv_lens", c_void_p),
        ("scratch", c_void_p),
        ("slots_width", c_int32),
        ("scratch_width", c_int32),
        ("window", c_int32),
        ("pool", Pool),
        ("layer_bytes", c_int64),
        ("seeds", c_void_p),
        ("ends", c_void_p),
        ("temperature", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("num_nodes", c_void_p),
    )


class DraftTrees(ctypes.Structure):
    """`DraftTrees` in sampling.h."""

    _fields_ = (
        ("num_trees", c_int32),
        ("width", c_int32),
        ("max_depth", c_int32),
        ("vocab_size", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_void_p),
        ("starts", c_void_p),
        ("logits", c_void_p),
        ("lengths", c_void_p),
        ("seeds", c_void_p),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
    )


class Kernels:
    """The functions of kernels.cpp."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.target: str = self._function("target", returns=c_char_p)().decode()
        self.lanes: int = self._function("lanes", returns=c_int32)()  # output channels of a block
        self.block_bytes = self._function("block_bytes", c_int32, c_int32, returns=c_int64)
        self.pack_dense = self._function("pack_dense", c_int32, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int64)
        self.pack_quantised = self._function(
            "pack_quantised", c_int32, *[c_void_p] * 3, c_int64, c_int32, c_void_p, c_int64, c_int64
        )
        of_rows = (POINTER(Matrix), c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32)
        self.linear, self.gated = self._function("linear", *of_rows), self._function("gated", *of_rows)
        self.attention = self._function(
            "attention", POINTER(Pool), POINTER(Requests), c_void_p, c_int64, c_int32, *[c_void_p] * 3, c_int32
        )
        of_layers = (POINTER(Layer), c_int32, POINTER(Sizes), POINTER(Step))
        self.layers = self._function("layers", *of_layers, *[c_void_p] * 3, c_int32)
        self.forward = self._function(
            "forward", POINTER(EmbedAndHead), *of_layers, c_void_p, c_void_p, c_int32, *[c_void_p] * 4, c_int32
        )
        self.norm = self._function("norm", c_void_p, c_void_p, c_int64, c_int32, c_float, c_void_p, c_int32)
        self.likeliest = self._function("likeliest", c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p)
        self.move_kv = self._function(
            "move_kv", c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p, c_int32, c_void_p
        )
        self.grow = self._function("grow", POINTER(DraftNetwork), POINTER(Growth), c_int32)
        self.add_noise = self._function("add_noise", c_void_p, c_int32, c_void_p, c_float, c_void_p)
        self.sample = self._function("sample", c_void_p, c_int64, c_int32, *[c_void_p] * 6, c_int32)
        self.walk = self._function("walk", POINTER(DraftTrees), *[c_void_p] * 3, c_int32)
        self.forbid = self._function("forbid", c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int64, c_int32)

    def _function(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        function = getattr(self._library, f"specray_{name}")
        function.argtypes, function.restype = arguments, returns
        return function


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or None where they are switched off or cannot be compiled, which is logged once.

    SPECRAY_KERNELS=torch switches them off. triton does so too: then `specray.ops.gpu` runs in Triton's interpreter.
    """
    wanted = os.environ.get("SPECRAY_KERNELS", "auto")
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(f"SPECRAY_KERNELS={wanted!r} is not known; set it to auto, torch or triton, or leave it out")
    reason = f"SPECRAY_KERNELS={wanted}"
    if wanted == "auto":
        try:
            return Kernels(build())
        except (BuildError, OSError) as error:
            reason = str(error)
    logger.warning(
        "no CPU kernels, so torch's operations are used: slower, without rounded activations, and except in float32 an "
        "output may depend on the batch and the drafter (%s)",
        reason,
    )
    return None


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a contiguous CPU tensor's data."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
