"""Cache folders for converted models and compiled kernels."""

import os
import stat
from pathlib import Path

from specray.errors import ConfigError


def cache_root() -> Path:
    """$SPECRAY_CACHE, or specray in the user's cache folder."""
    if own := os.environ.get("SPECRAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specray"


def kernel_cache() -> Path:
    """$SPECRAY_KERNEL_CACHE, or kernels in `cache_root`: compiled code, so files there must be allowed to run.

    Containers set it where the rest of the cache is part of a read-only image.
    """
    own = os.environ.get("SPECRAY_KERNEL_CACHE")
    return Path(own).expanduser() if own else cache_root() / "kernels"


def private_kernel_cache(name: str) -> Path:
    """A folder in `kernel_cache` that only this user can write to, for a compiler that trusts what it finds there.

    ConfigError if it cannot be made, or is another user's.
    """
    folder = kernel_cache() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error}); set SPECRAY_KERNEL_CACHE to a folder that can be written"
        ) from error
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others_write:
        raise ConfigError(
            f"{folder} holds compiled code, but other users can change it; remove it, or set SPECRAY_KERNEL_CACHE to a "
            "folder of your own"
        )
    return folder
