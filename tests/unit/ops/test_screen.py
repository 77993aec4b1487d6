"""Screened products: the largest output of each row has the bits of the whole product, whatever the weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.ops.cpu.library import kernels
from specray.ops.cpu.matrix import PackedMatrix
from tests.support.examples import at_most

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def screened(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The screened product and the whole one, float32."""
    own = kernels()
    if own is None:
        pytest.skip("needs the CPU kernels")
    matrix = PackedMatrix(own, weight)
    screen = matrix.screen_of(weight)
    assert screen is not None
    return matrix.largest(x, screen), matrix(x, torch.float32)


def assert_largest(found: torch.Tensor, whole: torch.Tensor) -> None:
    most = whole.amax(-1, keepdim=True)
    assert torch.equal(found.amax(-1, keepdim=True), most)
    is_largest = whole == most
    assert torch.equal(found[is_largest], whole[is_largest])  # all of them, also where several are equal
    assert (found[~is_largest] < most.expand_as(whole)[~is_largest]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@at_most(40)
def test_the_largest_are_those_of_the_whole_product(dtype: torch.dtype, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    outs, ins, count = (data.draw(st.integers(1, most)) for most in (300, 130, 16))
    weight = torch.randn(outs, ins, generator=generator)
    kind = data.draw(st.sampled_from(["random", "equal rows", "near ones", "all negative", "of many sizes"]))
    x = torch.randn(count, ins, generator=generator)
    if kind == "equal rows":
        weight = weight[torch.randint(0, max(outs // 8, 1), (outs,), generator=generator)]
    elif kind == "near ones":  # closer than 8 bits can tell
        weight = weight[:1] + weight * 1e-3
    elif kind == "all negative":
        weight, x = weight.abs(), -x.abs()
    elif kind == "of many sizes":
        weight = weight * torch.logspace(-3, 2, outs)[torch.randperm(outs, generator=generator)][:, None]
    assert_largest(*screened(weight.to(dtype), x.to(dtype)))


def test_few_blocks_are_computed_again() -> None:
    """Else a screen would bring nothing: most outputs differ from those of the whole product."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 64, generator=generator).bfloat16() for size in (4096, 1))
    found, whole = screened(weight, x)
    assert_largest(found, whole)
    assert (found == whole).float().mean() < 0.2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_not_finite_stays_so(value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 40, generator=generator) for size in (100, 2))
    x[1, 3] = value
    found, whole = screened(weight, x)
    torch.testing.assert_close(found[1], whole[1], equal_nan=True, rtol=0, atol=0)
    assert_largest(found[:1], whole[:1])


@pytest.mark.skipif(kernels() is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e8])
def test_weights_without_a_screen(value: float) -> None:
    own, weight = kernels(), torch.randn(100, 40)
    weight[1, 3] = value
    assert own is not None
    assert PackedMatrix(own, weight).screen_of(weight) is None
    assert PackedMatrix(own, weight[4:], torch.ones(96)).screen_of(weight[4:]) is None


@pytest.mark.parametrize("size", [1e-4, 1e-18, 1e-25, 0.0])
def test_very_small_rows(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(count, 64, generator=generator) for count in (300, 4))
    assert_largest(*screened(weight, x * size))
    assert_largest(*screened(weight * size, x))


def test_more_rows_are_not_screened() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 64, generator=generator).bfloat16() for size in (4096, 17))
    found, whole = screened(weight, x)
    assert torch.equal(found, whole)
