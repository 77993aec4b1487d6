"""Where files that can be made again are kept: converted models and compiled kernels."""

import os
from pathlib import Path


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
