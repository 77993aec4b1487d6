"""Triton kernels for NVIDIA GPUs; `specray.ops.device_ops` chooses whether to use them.

Each kernel computes what an operation of `TorchOps` or of `TorchStepOps` does. Tests compare the two in Triton's
interpreter on a CPU, and compile the kernels for GPUs. Modules with kernels are imported where they are used, because
only machines with GPUs have triton.
"""

import os
from importlib.util import find_spec

import torch

from specray.errors import ConfigError


def check_triton(device: torch.device, option: str = "attention_backend=triton") -> None:
    """ConfigError if Triton's kernels cannot compute on `device`; `option` asks for them."""
    if find_spec("triton") is None:
        raise ConfigError(f"{option} needs the package triton; pip install triton, or set it to torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"{option} needs an NVIDIA GPU, and the device is {device.type}; set it to auto or torch")
