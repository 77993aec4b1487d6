"""Head matrices in int8, in compressed-tensors' layout (`pack-quantized`, groups of 32 inputs).

A drafter's weights need less precision than the target's, because the target checks each draft. Served in int8, as the
CPU kernels do by default, a head keeps these very integers and scales; only an output matrix of its own is rounded
again, to 4 bits (see CoarseOutput).
"""

from typing import Any

import torch
from torch import Tensor

from specray.ops.grouped_weight import GROUP, to_int8

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
    "ignore": [],
}


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head with each matrix `*.weight` [outs, ins] as `*.weight_packed`, `_scale` and `_shape`.

    A matrix whose inputs do not fill groups and other tensors stay as they are.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.shape[1] % GROUP == 0:
            rounded = to_int8(tensor)
            stored[f"{name}_packed"] = rounded.ints.view(torch.int32)
            stored[f"{name}_scale"] = rounded.scales.half() if rounded.is_exact_in_half else rounded.scales
            stored[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            stored[name] = tensor
    return stored
