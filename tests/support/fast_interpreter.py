"""Triton's interpreter without its largest cost.

It replaces the functions of `triton.language` by its own for each launch, and again for each call of a device function,
and then puts them back; this takes longer than the kernels of small tests. Here they are replaced once and stay so:
with TRITON_INTERPRET=1, nothing in the process compiles a kernel.
"""

import os
from types import ModuleType
from typing import Any


class _NothingToRestore:
    def restore(self) -> None:
        pass


def patch_interpreter() -> None:
    """Make the interpreter of this process fast. Without Triton, or where kernels are compiled, nothing happens."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    known: set[frozenset[int]] = set()

    def patch_once(function: Any) -> _NothingToRestore:
        seen = frozenset(
            id(value)
            for value in function.__globals__.values()
            if isinstance(value, ModuleType) and any(value is language for language in languages)
        )
        if seen not in known:
            known.add(seen)
            patch(function)
        return _NothingToRestore()

    interpreter._patch_lang = patch_once
