"""Products of few rows, in Triton's interpreter, which has no early starts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specray.layers.linear import RowParallelLinear
from specray.layers.parallel import RankGroup
from specray.ops.gpu import few_rows
from specray.ops.gpu.few_rows import DEEP, MOST_ROWS, NARROW, WIDE, GpuMatrix, Tile, tile_of
from specray.ops.linear import is_row_wise, make_gated, make_linear

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3}
INS = DEEP.inputs
dtypes = st.sampled_from(list(TOLERANCE))


def numbers(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size).to(dtype)


@given(st.integers(0, MOST_ROWS + 2), st.sampled_from([1, 31, 64, 70]), dtypes, st.booleans(), st.booleans())
@settings(max_examples=40)
def test_products(rows: int, outs: int, dtype: torch.dtype, has_bias: bool, adds: bool) -> None:
    torch.manual_seed(rows + outs)
    x, weight, bias = numbers(rows, INS, dtype=dtype), numbers(outs, INS, dtype=dtype), numbers(outs, dtype=dtype)
    residual = numbers(rows, outs, dtype=dtype)
    matrix = GpuMatrix(weight, bias if has_bias else None)
    y = matrix.added(x, residual) if adds else matrix(x)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    if adds:
        expected += residual.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype] * INS**0.5, rtol=TOLERANCE[dtype])


@given(st.integers(1, MOST_ROWS), st.sampled_from([3, 64, 70]), dtypes)
@settings(max_examples=15)
def test_gated_units(rows: int, outs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + outs)
    x, weight = numbers(rows, INS, dtype=dtype), numbers(2 * outs, INS, dtype=dtype) / 20
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    expected, tolerance = F.silu(gate) * up, 4 * TOLERANCE[dtype]
    torch.testing.assert_close(GpuMatrix(weight).gated(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tile", [WIDE, DEEP, NARROW])
def test_a_row_has_the_same_bits_in_every_tile_and_among_few_others(
    tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, matrix = numbers(MOST_ROWS, INS, dtype=torch.bfloat16), GpuMatrix(numbers(40, INS, dtype=torch.bfloat16))
    monkeypatch.setattr(few_rows, "tile_of", lambda *_: tile)
    together = matrix(x)
    x[:-1] = torch.inf  # others may even be broken
    assert torch.equal(matrix(x)[-1], together[-1])
    assert torch.equal(matrix(x[-1:])[0], together[-1])


def test_the_tiles_of_llama_8b_on_132_processors() -> None:
    """q, k and v; output of attention; gate and up; down; head; the same of an EAGLE-3 head's vocabulary."""
    matrices = [(6144, False), (4096, False), (14336, True), (4096, False), (128256, False), (32000, False)]
    assert [tile_of(*matrix, 132) for matrix in matrices] == [NARROW, DEEP, WIDE, DEEP, WIDE, WIDE]


def test_more_rows_other_types_and_other_sizes_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuMatrix, "_few_rows", lambda *_, **__: pytest.fail("not torch's"))
    for rows, ins, dtype in [(MOST_ROWS + 1, INS, torch.bfloat16), (2, INS, torch.float32), (2, 96, torch.bfloat16)]:
        x, weight, residual = (numbers(*size, dtype=dtype) for size in ((rows, ins), (6, ins), (rows, 6)))
        matrix = GpuMatrix(weight)
        assert torch.equal(matrix(x), F.linear(x, weight))
        assert torch.equal(matrix.added(x, residual), F.linear(x, weight) + residual)


def test_linear_layers_are_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNELS", "triton")
    weight, x = numbers(8, INS, dtype=torch.bfloat16), numbers(3, INS, dtype=torch.bfloat16)
    linear, gated = make_linear(weight), make_gated(weight[:4], weight[4:])
    assert isinstance(linear, GpuMatrix)
    assert not is_row_wise(linear)
    assert not is_row_wise(gated)
    assert torch.equal(gated(x), linear.gated(x))  # type: ignore[attr-defined]
    residual = numbers(3, 8, dtype=torch.bfloat16)
    assert torch.equal(RowParallelLinear(weight, RankGroup()).added(x, residual), linear.added(x, residual))
