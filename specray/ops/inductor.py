"""Checks that Inductor, torch.compile's compiler, can run on this machine, and sets it up."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from specray.caches import private_kernel_cache
from specray.errors import ConfigError
from specray.ops.cpu.build import BuildError, find_compiler
from specray.ops.gpu import check_triton

_OPTION = "enable_torch_compile=true"


def check_inductor(device_type: str) -> None:
    """ConfigError if functions cannot be compiled for `device_type` on this machine."""
    if not _has_compiler():
        raise ConfigError(
            f"{_OPTION} needs a C++ compiler, and there is none; install g++ or set CXX, or set enable_torch_compile: "
            "false"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ConfigError(
            f"{_OPTION} needs {header}, which is not there; install Python's headers (python3-dev), or set "
            "enable_torch_compile: false"
        )
    if device_type == "cuda":
        check_triton(torch.device("cuda"), _OPTION)
        if not any(shutil.which(name) for name in (os.environ.get("CC") or "gcc", "gcc", "clang")):
            raise ConfigError(
                f"{_OPTION} needs a C compiler, and there is neither gcc nor clang; install gcc or set CC, or set "
                "enable_torch_compile: false"
            )


def check_inductor_if_used(device: str) -> None:
    """`check_inductor` before a server starts, if `EngineConfig.device` and the environment decide that it is needed.

    Where there is a C++ compiler there will be CPU kernels, which need no Inductor.
    """
    uses_kernels = os.environ.get("SPECRAY_KERNELS", "auto") == "auto" and _has_compiler()
    if device == "cuda" or not uses_kernels:
        check_inductor(device)


def inductor_options() -> dict[str, Any]:
    """Options for torch.compile, after Inductor was given a folder of its own.

    It reads pickles and libraries from there. Its default is a folder with a known name that any user can make first.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_kernel_cache("inductor"))  # torch may have set its default
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # no idle processes that wait for Triton's kernels
    return {"cpp.cxx": (find_compiler(),)}


def _has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True
