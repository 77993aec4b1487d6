"""The compiled kernels as Python functions, or None where they are switched off or cannot be compiled."""

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from specray.ops.cpu.build import BuildError, build
from specray.ops.cpu.structs import (
    CaptureStruct,
    CommittedStruct,
    ConvolutionStruct,
    DeltaNetStruct,
    DraftNetworkStruct,
    DraftTreesStruct,
    EmbedAndHeadStruct,
    GrowthStruct,
    LayerStruct,
    MatrixStruct,
    PassStruct,
    PendingTreesStruct,
    RequestBufferStruct,
    RequestsStruct,
    ScreenStruct,
    SizesStruct,
    StateRowsStruct,
    StepRowsStruct,
    StepStruct,
    check_layouts,
)

logger = logging.getLogger(__name__)


class Kernels:
    """The functions of kernels.cpp."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        check_layouts(self._function("layouts", returns=c_char_p)().decode())
        self.target: str = self._function("target", returns=c_char_p)().decode()
        self.lanes: int = self._function("lanes", returns=c_int32)()  # output channels of a block
        self.block_bytes = self._function("block_bytes", POINTER(MatrixStruct), returns=c_int64)
        to_blocks = c_int64, c_void_p, c_int64, c_int64
        self.pack_dense = self._function("pack_dense", POINTER(MatrixStruct), c_void_p, *to_blocks)
        of_groups = (POINTER(MatrixStruct), *[c_void_p] * 3)
        self.pack_quantised = self._function("pack_quantised", *of_groups, *to_blocks)
        self.pack_coded = self._function("pack_coded", *of_groups, *to_blocks)
        of_rows = (POINTER(MatrixStruct), c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32)
        self.linear, self.gated = self._function("linear", *of_rows), self._function("gated", *of_rows)
        self.largest = self._function(
            "largest",
            POINTER(MatrixStruct),
            POINTER(ScreenStruct),
            c_void_p,
            c_int32,
            c_int64,
            c_void_p,
            c_int32,
            c_int32,
        )
        self.attention = self._function(
            "attention",
            c_void_p,
            POINTER(RequestsStruct),
            c_void_p,
            c_int64,
            *[c_void_p] * 3,
            c_int32,
            c_int32,
        )
        of_layers = (POINTER(LayerStruct), c_int32, POINTER(SizesStruct), POINTER(StepStruct))
        self.layers = self._function("layers", *of_layers, *[c_void_p] * 2, POINTER(CaptureStruct), c_int32)
        of_pass = (POINTER(EmbedAndHeadStruct), *of_layers, POINTER(PassStruct), POINTER(CaptureStruct))
        self.start_forward = self._function("start_forward", *of_pass, c_int32, returns=c_int64)
        self.join = self._function("join", c_int64)
        self.norm = self._function("norm", c_void_p, c_void_p, c_int32, c_int64, c_int32, c_float, c_void_p, c_int32)
        of_states = (POINTER(StateRowsStruct), *[c_void_p] * 2)
        self.convolve = self._function("convolve", POINTER(ConvolutionStruct), *of_states, c_int32)
        self.gated_delta = self._function("gated_delta", POINTER(DeltaNetStruct), *of_states, *[c_void_p] * 3, c_int32)
        self.top_probs = self._function("top_probs", c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p)
        of_logits = (c_void_p, c_int32, c_int64, c_int64)
        self.soft_labels = self._function("soft_labels", *of_logits, c_void_p, c_int32)
        self.soft_loss = self._function(
            "soft_loss", c_void_p, *of_logits, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32
        )
        self.move_kv = self._function(
            "move_kv", c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p, c_int64
        )
        self.extend = self._function(
            "extend", POINTER(DraftNetworkStruct), POINTER(StepStruct), *[c_void_p] * 3, c_int32, c_int32
        )
        self.grow = self._function("grow", POINTER(DraftNetworkStruct), POINTER(GrowthStruct), c_int32)
        self.draft = self._function(
            "draft",
            POINTER(DraftNetworkStruct),
            POINTER(RequestBufferStruct),
            POINTER(CommittedStruct),
            POINTER(GrowthStruct),
            c_int32,
        )
        self.add_noise = self._function("add_noise", c_void_p, c_int32, c_void_p, c_float, c_void_p)
        self.sample = self._function("sample", c_void_p, c_int64, c_int32, *[c_void_p] * 6, c_int32)
        self.walk = self._function("walk", POINTER(DraftTreesStruct), c_void_p, c_int32)
        self.forbid = self._function("forbid", c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int64, c_int32)
        of_table = (POINTER(RequestBufferStruct), c_int64, c_void_p)
        self.build_step = self._function(
            "build_step", POINTER(RequestBufferStruct), POINTER(StepRowsStruct), c_int64, c_int64, c_void_p, c_void_p
        )
        self.step_after = self._function(
            "step_after", POINTER(StepStruct), POINTER(RequestBufferStruct), c_void_p, c_void_p, POINTER(StepStruct)
        )
        self.gather_cells = self._function("gather_cells", *of_table, c_void_p, c_int64, c_void_p)
        self.gather_kv_slots = self._function("gather_kv_slots", *of_table, c_void_p, c_int64, c_void_p)
        self.append_tokens = self._function("append_tokens", *of_table, c_void_p, c_int64)
        self.build_extend = self._function("build_extend", *of_table, *[c_void_p] * 6)
        of_pending = (POINTER(PendingTreesStruct), c_int64, *[c_void_p] * 4)
        self.put_trees = self._function("put_trees", *of_pending, c_void_p, c_int64)
        self.take_trees = self._function("take_trees", *of_pending, c_int64, *[c_void_p] * 3)

    def _function(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        function = getattr(self._library, f"specray_{name}")
        function.argtypes, function.restype = arguments, returns
        return function


def kernels() -> Kernels | None:
    """The kernels, or None where they are switched off or cannot be compiled, which is logged once.

    SPECRAY_KERNELS=torch switches them off. triton does so too: then `specray.ops.gpu` runs in Triton's interpreter.
    """
    return _kernels(os.environ.get("SPECRAY_KERNELS", "auto"))


@functools.cache
def _kernels(wanted: str) -> Kernels | None:
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
