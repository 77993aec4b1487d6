"""Triton kernels for NVIDIA GPUs, and the choice whether to use them.

Each kernel has a twin in torch. Tests compare the two in Triton's interpreter on a CPU, and compile the kernels for
GPUs. Modules with kernels are imported where they are used, because only machines with GPUs have triton.
"""

import os
from importlib.util import find_spec

import torch

from specray.errors import ConfigError


def uses_triton(device: torch.device) -> bool:
    """Whether Triton's kernels compute on `device`: a GPU, or, with SPECRAY_KERNELS=triton, a CPU by interpretation."""
    wanted = os.environ.get("SPECRAY_KERNELS", "auto")
    is_wanted = wanted == "triton" or (wanted == "auto" and device.type == "cuda")
    return is_wanted and find_spec("triton") is not None


def check_triton(device: torch.device) -> None:
    """ConfigError if Triton's kernels cannot compute on `device`."""
    if find_spec("triton") is None:
        raise ConfigError("attention_backend=triton needs the package triton; pip install triton, or set it to torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"attention_backend=triton needs an NVIDIA GPU, and the device is {device.type}; set it to auto or torch"
        )
