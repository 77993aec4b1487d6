"""The constants, structs and addresses that the compiled kernels share with Python; the headers explain the fields."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from itertools import zip_longest

import torch
from torch import Tensor

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `Kind` in matrix.h
KV_TYPES = {**FLOAT_TYPES, torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}  # of `Pool` in kv_pool.h
GROUP = 32  # activations that share a scale


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous CPU tensor's data."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()


class MatrixStruct(ctypes.Structure):
    """`Matrix` in matrix.h."""

    _fields_ = (
        ("kind", c_int32),
        ("outs", c_int32),
        ("ins", c_int32),
        ("zero", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
        ("is_16_bit", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class PoolStruct(ctypes.Structure):
    """`Pool` in kv_pool.h."""

    _fields_ = (
        ("data", c_void_p),
        ("slot_bytes", c_int64),
        ("type", c_int32),
        ("num_heads", c_int32),
        ("dim", c_int32),
    )


class LayerAttentionStruct(ctypes.Structure):
    """`LayerAttention` in kv_pool.h."""

    _fields_ = (
        ("pool", PoolStruct),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class RequestsStruct(ctypes.Structure):
    """`Requests` in queries.h."""

    _fields_ = (
        ("count", c_int32),
        ("slots_width", c_int32),
        ("mask_rows", c_int32),
        ("mask_columns", c_int32),
        ("query_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("tree_sizes", c_void_p),
        ("kv_slots", c_void_p),
        ("tree_mask", c_void_p),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` in layers.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    )


class SizesStruct(ctypes.Structure):
    """`Sizes` in layers.h."""

    _fields_ = (
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("eps", c_float),
    )


class StepStruct(ctypes.Structure):
    """`Step` in layers.h."""

    _fields_ = (
        ("count", c_int64),
        ("positions", c_void_p),
        ("written", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("requests", RequestsStruct),
        ("attention", c_void_p),
        ("read_lens", c_void_p),
    )


class CaptureStruct(ctypes.Structure):
    """`Capture` in layers.h."""

    _fields_ = (("copies", POINTER(c_void_p)), ("type", c_int32), ("stride", c_int32))


class ScreenStruct(ctypes.Structure):
    """`Screen` in screen.h."""

    _fields_ = (("matrix", MatrixStruct), ("errors", c_void_p), ("norms", c_void_p))


class EmbedAndHeadStruct(ctypes.Structure):
    """`EmbedAndHead` in layers.h."""

    _fields_ = (
        ("embedding", c_void_p),
        ("embedding_type", c_int32),
        ("num_columns", c_int32),
        ("norm", c_void_p),
        ("output", MatrixStruct),
        ("screen", ScreenStruct),
    )


class RequestBufferStruct(ctypes.Structure):
    """`RequestBuffer` in steps.h."""

    _fields_ = (("cells", c_void_p), ("row_size", c_int64), ("kv_column", c_int64), ("length_column", c_int64))


class DraftTreesStruct(ctypes.Structure):
    """`DraftTrees` in sampling.h."""

    _fields_ = (
        ("num_trees", c_int32),
        ("width", c_int32),
        ("max_depth", c_int32),
        ("vocab_size", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_void_p),
        ("logits", c_void_p),
        ("choices", c_void_p),
        ("lengths", c_void_p),
        ("seeds", c_void_p),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
    )


class VerificationStruct(ctypes.Structure):
    """`Verification` in verification.h."""

    _fields_ = (
        ("trees", DraftTreesStruct),
        ("buffer", RequestBufferStruct),
        ("slots", c_void_p),
        ("pool", c_void_p),
        ("num_layers", c_int64),
        ("layer_bytes", c_int64),
        ("slot_bytes", c_int64),
        ("outcome", c_void_p),
    )


class PassStruct(ctypes.Structure):
    """`Pass` in layers.h."""

    _fields_ = (
        ("ids", c_void_p),
        ("places", c_void_p),
        ("num_places", c_int32),
        ("hidden", c_void_p),
        ("final", c_void_p),
        ("logits", c_void_p),
        ("largest", c_void_p),
        ("verification", POINTER(VerificationStruct)),
    )


class DraftNetworkStruct(ctypes.Structure):
    """`DraftNetwork` in trees.h."""

    _fields_ = (
        ("fuse", MatrixStruct),
        ("fuse_norms", c_void_p),
        ("num_norms", c_int32),
        ("embedding", c_void_p),
        ("embedding_type", c_int32),
        ("vocab_size", c_int32),
        ("token_norm", c_void_p),
        ("state_norm", c_void_p),
        ("project", MatrixStruct),
        ("reads_states", c_int32),
        ("state_first", c_int32),
        ("residual_is_normed", c_int32),
        ("num_layers", c_int32),
        ("layers", c_void_p),
        ("sizes", SizesStruct),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("state_is_normed", c_int32),
        ("output_is_normed", c_int32),
        ("num_columns", c_int32),
        ("output", MatrixStruct),
        ("output_rows", c_void_p),
        ("rows_type", c_int32),
        ("target_ids", c_void_p),
        ("mask_state", c_void_p),
        ("mask_token", c_int64),
    )


class GrowthStruct(ctypes.Structure):
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
        ("attention", c_void_p),
        ("seeds", c_void_p),
        ("ends", c_void_p),
        ("temperature", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("num_nodes", c_void_p),
    )


class CommittedStruct(ctypes.Structure):
    """`Committed` in draft.h."""

    _fields_ = (
        ("count", c_int64),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("ends", c_void_p),
        ("hidden_states", c_void_p),
        ("type", c_int32),
    )


class StepRowsStruct(ctypes.Structure):
    """`StepRows` in steps.h."""

    _fields_ = (
        ("count", c_int64),
        ("width", c_int64),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_void_p),
    )


class PendingTreesStruct(ctypes.Structure):
    """`PendingTrees` in steps.h."""

    _fields_ = (
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_void_p),
        ("scores", c_void_p),
        ("width", c_int64),
    )


class StateRowsStruct(ctypes.Structure):
    """`StateRows` in states.h."""

    _fields_ = (
        ("count", c_int64),
        ("total", c_int64),
        ("slots", c_void_p),
        ("lens", c_void_p),
        ("num_known", c_void_p),
        ("is_fresh", c_void_p),
        ("parents", c_void_p),
        ("copies", c_void_p),
    )


class ConvolutionStruct(ctypes.Structure):
    """`Convolution` in states.h."""

    _fields_ = (
        ("size", c_int32),
        ("width", c_int32),
        ("has_silu", c_int32),
        ("type", c_int32),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("pool", c_void_p),
    )


class DeltaNetStruct(ctypes.Structure):
    """`DeltaNet` in states.h."""

    _fields_ = (
        ("num_k_heads", c_int32),
        ("num_v_heads", c_int32),
        ("k_dim", c_int32),
        ("v_dim", c_int32),
        ("type", c_int32),
        ("beta_scale", c_float),
        ("eps", c_float),
        ("rates", c_void_p),
        ("dt_bias", c_void_p),
        ("norm", c_void_p),
        ("pool", c_void_p),
    )


def layouts() -> str:
    """The layout of these structs, in the form of layouts.h."""
    return "".join(_layout(struct) for struct in ctypes.Structure.__subclasses__() if struct.__module__ == __name__)


def check_layouts(compiled: str) -> None:
    """Raises RuntimeError if the compiled library has other structs: its kernels would read wrong memory."""
    for ours, theirs in zip_longest(layouts().splitlines(), compiled.splitlines(), fillvalue="nothing"):
        if ours != theirs:
            raise RuntimeError(
                f"the struct {ours.split()[0]} of structs.py is not that of the compiled kernels: {ours!r} here, "
                f"{theirs!r} there; change both alike, and layouts.h"
            )


def _layout(struct: type[ctypes.Structure]) -> str:
    fields = [(name, getattr(struct, name)) for name, *_ in struct._fields_]
    parts = [f"{name} {field.offset} {field.size}" for name, field in fields]
    return f"{struct.__name__.removesuffix('Struct')} {ctypes.sizeof(struct)} {' '.join(parts)}\n"
