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


def check_triton(device: torch.device, option: str = "attention_backend=triton") -> None:
    """ConfigError if Triton's kernels cannot compute on `device`; `option` asks for them."""
    if find_spec("triton") is None:
        raise ConfigError(f"{option} needs the package triton; pip install triton, or set it to torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"{option} needs an NVIDIA GPU, and the device is {device.type}; set it to auto or torch")


def groups_experts(backend: str, quantization: str | None, device: torch.device) -> bool:
    """Whether the experts of a mixture run in Triton's grouped product and not one after the other.

    `backend` is `moe_runner_backend`, `quantization` that of the experts' matrices. ConfigError if they cannot.
    """
    is_quantised = quantization not in (None, "auto")  # auto quantises nothing on a GPU
    if backend == "triton":
        check_triton(device, "moe_runner_backend=triton")
        if is_quantised:
            raise ConfigError(
                f"moe_runner_backend=triton multiplies in the model's dtype, and quantization={quantization}; set "
                "quantization: null, or moe_runner_backend: auto"
            )
    return backend == "triton" or (backend == "auto" and not is_quantised and uses_triton(device))
