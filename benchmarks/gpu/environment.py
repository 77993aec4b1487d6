"""The part `environment`: what the other figures depend on, and what the next steps could use."""

import ctypes
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.report import Order, Report
from specray.cores import num_cores

PACKAGES = ("torch", "triton", "transformers", "ray", "flashinfer-python", "vllm")
STREAM_MEMORY = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS: a stream can wait for a value in memory
QUERY = ("driver_version", "compute_mode", "memory.total", "clocks.max.sm", "power.limit")


def report(order: Order) -> Report:
    rows = [["CPU cores", str(num_cores())], *([name, _version(name)] for name in PACKAGES)]
    rows.append(["MPS", shutil.which("nvidia-cuda-mps-control") or "not installed"])
    if order.device.type == "cuda":
        rows += _of_gpu(order.device)
    return Report(["what", "here"], rows, 2, "environment", [])


def _of_gpu(device: torch.device) -> list[list[str]]:
    properties = torch.cuda.get_device_properties(device)
    peers = [str(other) for other in range(1, torch.cuda.device_count()) if torch.cuda.can_device_access_peer(0, other)]
    return [
        ["GPUs", f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor}"],
        ["multiprocessors", str(properties.multi_processor_count)],
        ["peers of the first", ", ".join(peers) or "none"],
        ["CUDA of torch", str(torch.version.cuda)],
        ["streams wait for memory", _attribute(STREAM_MEMORY)],
        *map(list, zip(QUERY, _queried(), strict=False)),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _attribute(number: int) -> str:
    """An attribute of the first device, by the driver's library."""
    try:
        driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return "unknown"
    status = driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return str(value.value) if status == 0 else f"error {status}"


def _queried() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in done.stdout.split(",")]
