"""What transformers' modules compute outside our kernels: a row has the same bits in any batch."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.models.transformers_rows import Recorder, RowWise, compute_row_wise, reads_on_host
from specray.ops.cpu.library import kernels

WIDTH, ROWS = 23, 400  # a width that no vector register divides
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Function = Callable[[Tensor], Tensor]

# Functions of rows [n, WIDTH] that torch computes alike in every place, and the modules of decoders call.
LEFT_TO_TORCH: dict[str, Function] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: x.abs().log(),
    "log1p": lambda x: x.abs().log1p(),
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "reciprocal": torch.reciprocal,
    "sqrt": lambda x: x.abs().sqrt(),
    "square": lambda x: x.pow(2),
    "cube": lambda x: x.pow(3.0),
    "div": lambda x: x / 3.7,
    "add and mul": lambda x: x * 1.702 + x,
    "mean": lambda x: x.mean(-1, keepdim=True),
    "standard deviation": lambda x: x.std(-1, keepdim=True, unbiased=False),
    "root": lambda x: x.abs() ** 0.5,
    "sum": lambda x: x.sum(-1, keepdim=True),
    "root mean square": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "topk": lambda x: x.topk(5).values,
}
# Those that torch does not, so that ours take their place.
REPLACED: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "sigmoid, a method": lambda x: x.sigmoid(),
    "silu": F.silu,
    "silu, a module": nn.SiLU(),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "matmul of each row's matrices": lambda x: torch.matmul(x[:, :20].view(-1, 5, 4), x[:, :12].view(-1, 4, 3)),
}
OF_COMPLEX: dict[str, Function] = {
    "polar": lambda x: torch.view_as_real(torch.polar(torch.ones_like(x).float(), x.float())),
    "complex": lambda x: torch.view_as_real(_pairs(x) * _pairs(-x) * 1.5),
}


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack((x, x + 1), -1).float())


class Called(nn.Module):
    """A module whose forward method is a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads beside our kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_an_operation_that_is_left_to_torch_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    module, x = Called(LEFT_TO_TORCH[name]), rows(dtype)
    assert not found_in(module, x)
    assert_same_in_any_batch(module, x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", REPLACED | OF_COMPLEX)
def test_a_replaced_function_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    function = (REPLACED | OF_COMPLEX)[name]
    module, x = Called(function), rows(dtype)
    expected = module(x)
    assert found_in(module, x)
    compute_row_wise([module])
    assert not found_in(module, x)
    torch.testing.assert_close(module(x), expected)
    assert_same_in_any_batch(module, x)


@pytest.mark.skipif(kernels() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_router_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight, bias = (nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((6, WIDTH), (6,)))
    routers: list[Function] = [
        lambda x: F.linear(x, weight),
        lambda x: F.linear(x, weight, bias),
        lambda x: F.linear(x.float(), weight.type(torch.float32)),
        lambda x: F.linear(x.float(), weight.float()),
    ]
    x = rows(dtype)
    for router in routers:
        module = Called(router)
        expected = module(x)
        compute_row_wise([module])
        assert not found_in(module, x)
        torch.testing.assert_close(module(x), expected, atol=0.05, rtol=0.05)
        assert_same_in_any_batch(module, x)


@pytest.mark.skipif(kernels() is None, reason="the CPU kernels are not compiled")
def test_experts_that_all_see_all_tokens_have_the_same_bits_in_any_batch() -> None:
    experts = nn.Parameter(torch.randn(3, WIDTH, 8))
    module, x = Called(lambda x: torch.bmm(x.expand(3, -1, -1), experts).sum(0)), rows(torch.float32)
    expected = module(x)
    compute_row_wise([module])
    assert not found_in(module, x)
    torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=1e-4)
    assert_same_in_any_batch(module, x)


def test_a_product_of_two_activations_is_found() -> None:
    module = Called(lambda x: x @ x.t())
    compute_row_wise([module])
    assert set(found_in(module, rows(torch.float32))) == {"mm"}


def test_the_module_is_found_whose_own_method_runs_an_operation() -> None:
    inner = Called(torch.sigmoid)
    outer = nn.Sequential(Called(torch.exp), inner)
    assert found_in(outer, rows(torch.float32)) == {"sigmoid": {inner}}


def test_parameters_are_cast_once() -> None:
    weight = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.bfloat16))
    with RowWise():
        first, second = weight.type(torch.float32), weight.type(torch.float32)
    assert first is second


def rows(dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))).to(dtype)


def found_in(module: nn.Module, x: Tensor) -> dict[str, set[nn.Module]]:
    with Recorder(module) as recorder:
        module(x)
    return recorder.found


def assert_same_in_any_batch(function: Function, x: Tensor) -> None:
    together = function(x)
    for start, count in [(0, 1), (1, 1), (ROWS - 1, 1), (5, 2), (17, 3), (100, 7), (200, 33), (1, 40), (9, 200)]:
        part = slice(start, start + count)
        assert torch.equal(function(x[part].clone()), together[part]), (start, count)


def test_storing_several_values_under_a_mask_is_a_read_of_the_host() -> None:
    x, mask, index = torch.zeros(4), torch.tensor([True, False, True, False]), torch.tensor([0, 2])
    put = torch.ops.aten.index_put_.default
    assert reads_on_host(put, (x, [mask], torch.ones(2)), {})
    assert not reads_on_host(put, (x, [mask], torch.tensor(1.0)), {})
    assert not reads_on_host(put, (x, [index], torch.ones(2)), {})
