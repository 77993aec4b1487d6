"""A description of this machine: processor, cores, memory, GPU, and versions of the main packages."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from specray import __version__
from specray.cores import num_cores
from specray.ops.cpu.processor import cpu_name, num_threads

PACKAGES = ("torch", "transformers", "ray")


def describe_machine() -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {**facts, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else facts


def versions() -> dict[str, str]:
    return {"specray": __version__, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def one_line() -> str:
    """Machine and versions for a caption."""
    facts = describe_machine()
    device = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"
    return f"{device}, {facts['memory_gib']} GiB; " + ", ".join(f"{name} {v}" for name, v in versions().items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
