"""Random weights as quantised checkpoints store them."""

import torch

from specray.ops.quantised_weight import E4M3, Code, QuantisedWeight


def coded(
    code: Code, outs: int, ins: int, group: int, dtype: torch.dtype = torch.float32, has_zeros: bool = False
) -> QuantisedWeight:
    """Codes of all values, with scales of `dtype`; uint8: exponents."""
    generator = torch.Generator().manual_seed(outs + 1000 * ins + group)
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
