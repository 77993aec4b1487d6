"""Quantised blocks of GGUF files keep their values."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from specray.models.gguf_blocks import grouped_weight
from specray.ops.cpu.library import kernels
from specray.ops.cpu.matrix import PackedMatrix

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Where a block's float16 scales are, in bytes.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def random_blocks(kind: str, outs: int, ins: int) -> np.ndarray:
    """Any bytes are valid integers; only the scales must be finite."""
    generator = np.random.default_rng(0)
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (outs * ins // size, num_bytes), dtype=np.uint8)
    for place in SCALES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        scales = generator.uniform(0.01, 1.0, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(120, 128, len(blocks))
    return blocks.reshape(outs, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_those_of_the_gguf_package(kind: str) -> None:
    blocks = random_blocks(kind, 20, 512)
    weight = grouped_weight(kind, torch.from_numpy(blocks))
    assert weight is not None
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    assert weight.shape == (20, 512)
    assert torch.allclose(weight.float(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
def test_packed_blocks_lose_nothing(kind: str) -> None:
    """Activations of one nonzero value, which 8 bits hold exactly, read out single weights."""
    weight = grouped_weight(kind, torch.from_numpy(random_blocks(kind, 20, 256)))
    own = kernels()
    assert weight is not None
    assert own is not None
    columns = PackedMatrix(own, weight)(torch.eye(256))
    assert torch.allclose(columns.T, weight.float(), rtol=1e-5, atol=1e-5)


def test_other_types_are_left_to_the_caller() -> None:
    assert grouped_weight("TQ2_0", torch.zeros(1, 66, dtype=torch.uint8)) is None
