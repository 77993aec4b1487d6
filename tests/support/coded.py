"""Random weights as quantised checkpoints store them."""

import torch

from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, Code, QuantisedWeight

# As published checkpoints have them: (code, type of the scales, zeros, group size; None: all inputs).
FORMATS = {
    "fp8 blocks": (E4M3, torch.float32, False, 128),
    "fp8 channels": (E4M3, torch.bfloat16, False, None),
    "int8 channels": (INT8, torch.bfloat16, False, None),
    "awq": (INT4, torch.float16, True, 64),
    "gptq": (INT4, torch.float16, False, 128),
    "gptq of 8 bits": (INT8, torch.float16, True, 32),
    "compressed-tensors": (INT4, torch.bfloat16, False, 32),
    "mxfp4": (E2M1, torch.uint8, False, 32),
}


def weight_of(name: str, outs: int, ins: int, seed: int = 0) -> QuantisedWeight:
    code, dtype, has_zeros, group = FORMATS[name]
    return coded(code, outs, ins, min(group or ins, ins), dtype, has_zeros, seed)


def coded(
    code: Code,
    outs: int,
    ins: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    has_zeros: bool = False,
    seed: int = 0,
) -> QuantisedWeight:
    """Codes of all values, with scales of `dtype`; uint8: exponents."""
    generator = torch.Generator().manual_seed(outs + 1000 * ins + group + 7919 * seed)
    wide, groups = -(-ins * code.bits // 8), -(-ins // group)
    codes = torch.randint(0, 256, (outs, wide), dtype=torch.uint8, generator=generator)
    if code == E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0x35  # NaN
    scales = torch.rand(outs, groups, generator=generator) / 16 + 1 / 64
    if dtype is torch.uint8:
        stored = torch.randint(118, 124, (outs, groups), dtype=torch.uint8, generator=generator)
    else:
        stored = scales.to(dtype)
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, 1 << code.bits, (outs, groups), dtype=torch.uint8, generator=generator)
    return QuantisedWeight(code, ins, group, codes, stored, zeros)
