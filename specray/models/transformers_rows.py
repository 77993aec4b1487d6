"""Whether a row of a pass has the same bits in any batch, and functions that see to it in place of torch's.

torch's matrix products on a CPU sum in an order that depends on the number of rows. Its vector instructions compute
sigmoid, silu, gelu, softplus and products of complex numbers otherwise than what it runs for the last numbers of a
tensor, so that a row's bits depend on its place. On a GPU each number is computed alike, but sums are split by the
number of rows. `RowWise` has functions without either; what it cannot replace, `Recorder` finds.

Operations in `specray.ops` know themselves whether they are row-wise, and are not recorded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specray.models.transformers_states import StateLayer
from specray.ops.linear import make_batched, make_linear
from specray.ops.row_wise import gelu, matmul, polar, product, sigmoid, silu, softplus
from specray.ops.torch_matrix import Linear

# torch's operations that compute each row of a batch alike on any device, as long as sums run over a row's own numbers.
# Those with `max` choose among forms of RoPE by the largest position, of contexts that are not served.
_ROW_WISE = {
    *("_reshape_alias", "_to_copy", "_unsafe_view", "abs", "add", "add_", "alias", "arange", "bitwise_not", "cat"),
    *("clamp", "clone", "complex", "constant_pad_nd", "copy_", "cos", "detach", "div", "div_", "embedding", "empty"),
    *("empty_like", "eq", "erf", "exp", "exp_", "expand", "expm1", "floor", "full", "full_like", "gather", "ge", "gt"),
    *("index", "index_add_", "index_select", "le", "lift_fresh", "log", "log1p", "log1p_", "lt", "masked_fill", "max"),
    *("minimum", "mul", "mul_", "narrow", "native_layer_norm", "neg", "new_empty", "new_zeros", "nonzero", "ones"),
    *("ones_like", "permute", "pow", "reciprocal", "reciprocal_", "relu", "repeat", "reshape", "rsqrt", "scatter"),
    *("scatter_", "select", "sin", "slice", "_softmax", "split", "split_with_sizes", "sqrt", "squeeze", "stack", "sub"),
    *(
        "_is_all_true",
        "_local_scalar_dense",
        "erfinv",
        "logical_and",
        "scalar_tensor",
        "t",
        "tanh",
        "topk",
        "transpose",
        "unbind",
        "unsafe_split",
        "unsqueeze",
        "view",
        "view_as_complex",
    ),
    *("view_as_real", "where", "zeros", "zeros_like"),
}
_READING = {
    *("_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "unique_dim", "_unique2"),
}
_ON_CPU = {"mean", "std", "sum"}
_ON_GPU = {"gelu", "polar", "sigmoid", "sigmoid_", "silu", "softplus"}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operations within it that may compute a row otherwise in another batch.

    `found` has, for each name of an operation, the modules of `body` whose own forward method ran it. `readers` are the
    modules that read on the host what the device computes, or copy to it what the host does.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, set[nn.Module]] = {}
        self.readers: list[nn.Module] = []
        self._body = body
        self._running = [body]
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for module in self._body.modules():
            self._hooks.append(module.register_forward_pre_hook(lambda part, _: self._running.append(part)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not _is_row_wise(name, args):
            self.found.setdefault(name, set()).add(self._running[-1])
        is_within = len(self._running) > 1
        if is_within and (reads_on_host(func, args, kwargs or {}) or _crosses_devices(name, args, out)):
            self.readers.append(self._running[-1])
        return out

    def _leave(self) -> None:
        self._running.pop()


def reason_without_graphs(body: nn.Module, recorder: Recorder) -> str | None:
    """Why a pass through `body`, which `recorder` has seen, cannot be captured as a CUDA graph; None if it can."""
    if any(hasattr(part, "packed_experts") for part in body.modules()):
        return "its experts are not captured: some run one after the other, and the host reads which have tokens"
    # The host plans the states of a pass without a graph alone.
    readers = [type(part).__name__ for part in recorder.readers if not isinstance(part, StateLayer)]
    return (
        f"{readers[0]} of transformers reads device tensors on the host or copies host values to the device"
        if readers
        else None
    )


def reads_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator reads a tensor on the host."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        has_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
        return has_mask and not (len(args) > 2 and args[2].numel() == 1)  # one value is filled in without a count
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func.name().removeprefix("aten::").partition(".")[0] in _READING


def _crosses_devices(name: str, args: Sequence[Any], out: Any) -> bool:
    if name == "lift_fresh":  # a number of the host becomes a tensor
        return True
    inputs = [part for part in args if isinstance(part, Tensor) and part.dim()]
    return name in ("_to_copy", "copy_") and any(part.device != out.device for part in inputs)


def _is_row_wise(name: str, args: Sequence[Any]) -> bool:
    inputs = [part for part in args if isinstance(part, Tensor)]
    if any(part.is_cuda for part in inputs):
        return name in _ROW_WISE or name in _ON_GPU
    if name == "mul":
        return not any(part.is_complex() for part in inputs)
    if name == "rsqrt":  # in other types its vector instructions round once more
        return inputs[0].dtype is torch.float32
    if name == "pow" and isinstance(args[1], Tensor):  # frequencies of RoPE, which are constants
        return not isinstance(args[0], Tensor)
    if name == "pow":  # products and roots; others are computed otherwise in a tensor's last numbers
        return args[1] in (0.5, 2, 3) or (args[1] == -0.5 and inputs[0].dtype is torch.float32)
    return name in _ROW_WISE or name in _ON_CPU


def compute_row_wise(modules: Iterable[nn.Module]) -> None:
    """Let the forward methods of `modules` call the functions of `RowWise`."""
    functions = RowWise()
    for module in modules:
        module.forward = _within(functions, module.forward)


def _within(functions: "RowWise", forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    return run


class RowWise(TorchFunctionMode):
    """Within it, torch's functions give a row the same bits in any batch, where `make_linear` has such kernels.

    Matrices are parameters, which are packed when they are first read; so are their copies in another type.
    """

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[tuple[Any, ...], Tensor] = {}  # copies of parameters in another type
        self._packed: dict[int, tuple[Tensor, Linear]] = {}  # a parameter or such a copy by its id, and itself
        self._functions: dict[Any, Callable[..., Tensor]] = {
            **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), sigmoid),
            F.silu: silu,
            F.gelu: gelu,
            F.softplus: softplus,
            torch.polar: polar,
            **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), product),
            **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
            F.linear: self._linear,
            **dict.fromkeys((torch.bmm, Tensor.bmm), self._linears),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS and isinstance(args[0], nn.Parameter):
            key = (id(args[0]), func, *args[1:], *kwargs.items())
            if key not in self._casts:
                self._casts[key] = func(*args, **kwargs)
            return self._casts[key]
        return self._functions.get(func, func)(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._is_constant(weight):
            return F.linear(input, weight, bias)
        run = self._matrix(weight, lambda: make_linear(weight.data, None if bias is None else bias.data))
        return run(input.reshape(-1, weight.shape[1])).view(*input.shape[:-1], len(weight))

    def _linears(self, input: Tensor, mat2: Tensor) -> Tensor:
        if not self._is_constant(mat2):
            return torch.bmm(input, mat2)
        return self._matrix(mat2, lambda: make_batched(mat2.data.transpose(1, 2)))(input)

    def _is_constant(self, weight: Tensor) -> bool:
        return isinstance(weight, nn.Parameter) or any(weight is cast for cast in self._casts.values())

    def _matrix(self, weight: Tensor, pack: Callable[[], Linear]) -> Linear:
        if id(weight) not in self._packed:
            self._packed[id(weight)] = weight, pack()
        return self._packed[id(weight)][1]


_CASTS = {Tensor.to, Tensor.type, Tensor.float}
