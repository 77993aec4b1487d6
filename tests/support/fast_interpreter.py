"""Triton's interpreter without its largest cost, and with matrix products like a GPU's.

It replaces the functions of `triton.language` by its own for each launch, and again for each call of a device function,
and then puts them back; this takes longer than the kernels of small tests. Here they are replaced once and stay so:
with TRITON_INTERPRET=1, nothing in the process compiles a kernel.

A tensor core computes each element of a product in the same way. The interpreter calls a BLAS library, which on some
CPUs sums the rows at a tile's end in another order than the first ones.
"""

import os
from types import ModuleType
from typing import Any

import numpy as np


class _NothingToRestore:
    def restore(self) -> None:
        pass


def _fixed_order_dot(interpreter: Any) -> Any:
    blas_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        if any(x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8 for x in (a, b)):
            return blas_dot(self, a, b, sums, *options)  # converts them
        dtype = sums.data.dtype
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=dtype, casting="same_kind")
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    return create_dot


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
    interpreter.InterpreterBuilder.create_dot = _fixed_order_dot(interpreter)
