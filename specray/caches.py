"""Where files that can be made again are kept: converted models and compiled kernels."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$SPECRAY_CACHE, or specray in the user's cache folder."""
    if own := os.environ.get("SPECRAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specray"
