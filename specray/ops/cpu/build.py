"""Compiles the kernels for this machine's own instructions. `python -m specray.ops.cpu.build` does it ahead of time.

The library is kept in the cache folder, under a name made of the sources, the compiler, its flags and the CPU. It takes
about 20 seconds once. SPECRAY_KERNEL_FLAGS adds flags to the compiler's, such as `-march=haswell`.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from specray.caches import kernel_cache
from specray.ops.cpu.processor import cpu_features

SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"
# Without reassociation GCC keeps the sums of integers in registers: up to a third faster.
FLAGS = ("-std=c++17", "-O3", "-fno-tree-reassoc", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be compiled here."""


def build() -> Path:
    """The compiled library; compiles it if the cache does not have it. Raises BuildError."""
    compiler = find_compiler()
    flags = [*FLAGS, *_target_flags(), *shlex.split(os.environ.get("SPECRAY_KERNEL_FLAGS", ""))]
    target = kernel_cache() / f"{_key(compiler, flags)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together; one compiles, the others wait
            if not target.is_file():
                _compile(compiler, flags, target)
    except OSError as error:
        raise BuildError(
            f"{target.parent} cannot be written ({error}); set SPECRAY_KERNEL_CACHE to a folder that can"
        ) from error
    return target


def find_compiler() -> str:
    """$CXX, or the first C++ compiler that is installed. Raises BuildError."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C++ compiler ({wanted or ', '.join(COMPILERS)}); install g++ or set CXX")


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    partial = target.with_suffix(".partial")
    command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(partial)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {TIMEOUT_S} s") from error
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
    partial.replace(target)


def _target_flags() -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return ["-march=native", *(["-mprefer-vector-width=512"] if is_x86 else [])]


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest.update(repr((version, flags, platform.machine(), cpu_features())).encode())
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(f"error: {error}")
