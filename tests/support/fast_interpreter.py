"""Triton's interpreter without its largest costs, and with matrix products like a GPU's.

It replaces the functions of `triton.language` by its own for each launch, and again for each call of a device function,
and then puts them back; this takes longer than the kernels of small tests. Here they are replaced once and stay so:
with TRITON_INTERPRET=1, nothing in the process compiles a kernel. Each value's type and shape would be made from new
objects; here equal ones share them, as nothing changes them. Operands of equal types would be checked and converted to
the type that they have. Additions of integers would be repeated with 64 bits to find overflows, and the finding
dropped, because only a debugger asks for it. Memory would be copied to the host, where it is, and back.

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


def _share_shapes(interpreter: Any) -> None:
    """Let equal types share their shape and name, and tensors of equal shapes theirs, which are then not broadcast."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (*(part.value if isinstance(part, core.constexpr) else part for part in shape), element_ty.name)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = type_init, tensor_init
    semantic.broadcast_impl_value = broadcast_others


def _accept_equal_types(interpreter: Any) -> None:
    """Let operands of equal types and shapes be used as they are, and small numbers have the other operand's type."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    check_others, are_others_equal = semantic.binary_op_type_checking_impl, core.dtype.__eq__
    integers, floats = {"int32", "int64", "uint32", "uint64"}, {"fp32", "fp64"}
    exact = integers | floats | {"int1"}

    def checked(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        if type(lhs) is core.tensor and lhs.dtype.name in exact:
            if type(rhs) is core.tensor:
                if lhs.shape is rhs.shape and lhs.dtype.name == rhs.dtype.name:
                    return lhs, rhs
            elif (type(rhs) is int and 0 <= rhs < 2**31 and lhs.dtype.name in integers) or (
                type(rhs) is float and lhs.dtype.name in floats
            ):
                data = np.full(lhs.handle.data.shape, rhs, interpreter._get_np_dtype(lhs.dtype))
                return lhs, core.tensor(interpreter.TensorHandle(data, lhs.dtype), lhs.type)
        return check_others(self, lhs, rhs, *options, **named)  # type: ignore[no-any-return]

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or are_others_equal(self, other)

    semantic.binary_op_type_checking_impl, core.dtype.__eq__ = checked, is_equal


def _share_numpy_types(interpreter: Any) -> None:
    """Look up the numpy type of a type by its name, where a table of all types would be made for each look-up."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = look_up(type)
        return known[type.name]

    interpreter._get_np_dtype = numpy_type


def _round_bfloat16(interpreter: Any) -> None:
    """Round float32 to bfloat16 as GPUs do, to nearest and ties to even, where the interpreter cuts bits off."""
    tl, cast_others = interpreter.tl, interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        if value.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast_others(self, value, dtype)
        bits = np.ascontiguousarray(value.data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        rounded = np.where(np.isnan(value.data), bits >> 16 | 0x40, rounded).astype(np.uint16)
        return interpreter.TensorHandle(rounded, dtype.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast


def _call_directly(interpreter: Any) -> None:
    """Let the functions of the language be called without wrappers that copy their arguments."""

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:  # noqa: ARG001
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_attribute


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
    modules: dict[int, dict[str, Any]] = {}  # whose functions need nothing more, by their address

    def patch_once(function: Any) -> _NothingToRestore:
        if id(function.__globals__) in modules:
            return _NothingToRestore()
        modules[id(function.__globals__)] = function.__globals__
        seen = frozenset(
            id(value)
            for value in function.__globals__.values()
            if isinstance(value, ModuleType) and any(value is language for language in languages)
        )
        if seen not in known:
            known.add(seen)
            patch(function)
        return _NothingToRestore()

    _share_shapes(interpreter)
    _accept_equal_types(interpreter)
    _share_numpy_types(interpreter)
    _call_directly(interpreter)
    _round_bfloat16(interpreter)
    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.GridExecutor._init_args_hst = lambda _self, args, named: (args, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    interpreter.InterpreterBuilder.create_dot = _fixed_order_dot(interpreter)
