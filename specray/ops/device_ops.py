"""The choice of a device's operations: the one place that asks on which device a computation runs.

A layer or a request table asks for its operations once, when it is made; a sampler asks for those of its tensors.
`TorchOps` defines what each operation computes, and the others are tested against it.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from specray.errors import ConfigError
from specray.ops.cpu.library import kernels
from specray.ops.cpu.ops import CpuOps
from specray.ops.gpu import check_triton
from specray.ops.torch_ops import TorchOps

_TORCH_OPS = TorchOps()


def ops_on(device: torch.device) -> TorchOps:
    """The operations for `device`: Triton's on a GPU, our C++ kernels on a CPU, and torch's where they are missing.

    SPECRAY_KERNELS=torch takes torch's everywhere; triton takes Triton's everywhere, on a CPU by interpretation.
    """
    wanted = os.environ.get("SPECRAY_KERNELS", "auto")
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        return _triton_ops() if find_spec("triton") is not None else _TORCH_OPS
    if device.type == "cpu" and (library := kernels()) is not None:
        return _cpu_ops(library)
    return _TORCH_OPS


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
    return backend == "triton" or (backend == "auto" and ops_on(device).groups_experts(is_quantised))


@cache
def _triton_ops() -> TorchOps:
    from specray.ops.gpu.ops import TritonOps  # triton is installed on machines with GPUs only

    return TritonOps()


_cpu_ops = cache(CpuOps)
