"""Matrix products in a fixed order, in Triton's interpreter: right, and the same bits in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specray.ops.gpu.matrix import COLUMNS, MANY_ROWS, TiledMatrix, tile_columns
from specray.ops.linear import fixed_order, is_row_wise, make_gated, make_linear

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
dtypes = st.sampled_from(list(TOLERANCE))


@given(
    st.sampled_from([0, 1, 2, MANY_ROWS - 1, MANY_ROWS + 3]),
    st.sampled_from([1, 17, 31, 64, 100]),
    st.sampled_from([1, 8, 33, 64, 200]),
    dtypes,
    st.booleans(),
    st.sampled_from(COLUMNS),
)
@settings(max_examples=60)
def test_products(rows: int, outs: int, ins: int, dtype: torch.dtype, has_bias: bool, columns: int) -> None:
    torch.manual_seed(rows + outs + ins)
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((rows, ins), (outs, ins), (outs,)))
    matrix = TiledMatrix(weight, bias if has_bias else None)
    matrix._columns = columns
    y = matrix(x)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype] * ins**0.5, rtol=TOLERANCE[dtype])


@given(st.integers(1, 2 * MANY_ROWS + 5), dtypes, st.integers(0, 10**6))
@settings(max_examples=15)
def test_a_row_has_the_same_bits_alone_and_among_others(rows: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, 150, generator=generator).to(dtype) for size in (rows, 70))
    matrix = TiledMatrix(weight, weight[:, 0])
    together = matrix(x)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(matrix(x[row : row + 1]), together[row : row + 1])
    x[:-1] = torch.inf  # others may even be broken
    assert torch.equal(matrix(x)[-1], together[-1])


def test_the_tile_depends_on_the_matrix_alone() -> None:
    """Llama 8B on a GPU of 132 processors: 64 tiles of 64 columns would leave half of them without work."""
    assert [tile_columns(outs, 132) for outs in (4096, 6144, 28672, 128256)] == [32, 32, 64, 64]


def test_linear_layers_take_it_where_the_order_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNELS", "triton")
    weight, x = torch.randn(6, 8), torch.randn(3, 8)
    plain = make_linear(weight), make_gated(weight, weight)
    with fixed_order(True):
        fixed = make_linear(weight), make_gated(weight, weight)
    with fixed_order(False):
        again = make_linear(weight)
    assert [is_row_wise(linear) for linear in (*plain, *fixed, again)] == [False, False, True, True, False]
    for one, other in zip(plain, fixed, strict=True):
        torch.testing.assert_close(one(x), other(x))
