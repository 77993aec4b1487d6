"""The layers' Triton kernels, in the interpreter, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specray.ops.gpu import layers
from specray.ops.torch_ops import TorchOps

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
dtypes = st.sampled_from(list(TOLERANCE))
sizes = st.sampled_from([1, 2, 17, 64, 576, 1000])
counts = st.integers(0, 4)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_close(seen: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(seen.double(), expected, atol=TOLERANCE[seen.dtype], rtol=TOLERANCE[seen.dtype])


@given(counts, sizes, dtypes, st.booleans())
@settings(max_examples=60)
def test_norms(count: int, size: int, dtype: torch.dtype, adds: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(n, size).to(dtype) for n in (count, count, 1))
    before, summed = residual.clone(), x.double() + residual.double()
    if adds:
        out = layers.add_rms_norm(x, residual, weight[0], EPS)
        assert_close(x, summed)  # the interpreter does not round bfloat16 as a GPU does
        assert torch.equal(residual, before)
    else:
        out = layers.rms_norm(x, weight[0], EPS)
    assert out.dtype == dtype
    assert_close(out, normed(x, weight[0]))


@given(counts, sizes, dtypes, st.booleans())
@settings(max_examples=40)
def test_embeddings_and_states_are_normed_and_joined(count: int, size: int, dtype: torch.dtype, keeps: bool) -> None:
    torch.manual_seed(0)
    embedding, states, weights = (torch.randn(n, size).to(dtype) for n in (9, count, 2))
    token_ids = torch.randint(0, 9, (count,))
    joined, kept = layers.join_normed(token_ids, embedding, states, (weights[0], weights[1]), EPS, keeps)
    expected = normed(states, weights[1])
    assert_close(joined, torch.cat((normed(embedding[token_ids], weights[0]), expected), 1))
    assert (kept is None) != keeps
    if kept is not None:
        assert_close(kept, expected)


@given(counts, st.sampled_from([2, 16, 80, 128]), dtypes)
@settings(max_examples=20)
def test_angles_of_positions(count: int, dim: int, dtype: torch.dtype) -> None:
    cos_table, sin_table = torch.randn(2, 50, dim)
    positions = torch.randint(0, 50, (2, count)).T[:, 0]
    cos, sin = layers.angles_at((cos_table, sin_table), positions, dtype)
    assert cos.dtype == sin.dtype == dtype
    assert_close(cos, cos_table[positions].double()[:, None])  # see `test_norms` about bfloat16
    assert_close(sin, sin_table[positions].double()[:, None])


def test_a_norm_reads_rows_with_a_stride() -> None:
    wide = torch.randn(5, 4, 6)
    assert_close(layers.rms_norm(wide[:, 1:3], torch.ones(6), EPS), normed(wide[:, 1:3], torch.ones(6)))


@given(counts, st.sampled_from([1, 3, 16, 1024, 1536]), dtypes)
@settings(max_examples=40)
def test_gated_units(count: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(count, 2 * size).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = layers.silu_and_mul(gate_up)
    assert out.shape == (count, size)
    assert_close(out, gate * gate.sigmoid() * up)


@given(
    counts, st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]), st.sampled_from([2, 16, 80, 128]), dtypes, st.booleans()
)
@settings(max_examples=80)
def test_heads_are_normed_rotated_and_stored(
    count: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    torch.manual_seed(0)
    q_heads, kv_heads = heads
    qkv = torch.randn(count, q_heads + 2 * kv_heads, dim).to(dtype)
    cos, sin = torch.randn(2, count, 1, dim)
    weights = torch.rand(2, dim).to(dtype) + 0.5
    pool = torch.randn(11, 2, kv_heads, dim).to(dtype)
    slots = torch.randperm(11)[:count]
    q, k, v = qkv.double().split((q_heads, kv_heads, kv_heads), 1)
    if has_norms:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    q, k = (x * cos + x.roll(dim // 2, -1) * sin for x in (q, k))
    expected = pool.double()
    expected[slots] = torch.stack((k, v), 1)
    layers.rotate_and_store(qkv, cos, sin, (weights[0], weights[1]) if has_norms else None, EPS, pool, slots)
    assert_close(qkv[:, :q_heads], q)
    assert_close(pool, expected)


@given(counts, sizes, st.sampled_from([0, 1, 15]), st.booleans())
@settings(max_examples=40)
def test_rows_in_float8(count: int, size: int, padding: int, has_zeros: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(count, size) * torch.logspace(-3, 3, max(count, 1))[:count, None]).bfloat16()
    if has_zeros:
        x[:1] = 0
    seen, scales = layers.quantise_rows(x, size + padding, 1e-30)
    expected, expected_scales = TorchOps().quantise_rows(x, size + padding, 1e-30)
    torch.testing.assert_close(scales, expected_scales)
    exact, given, wanted = x.float() / expected_scales, seen.float()[:, :size], expected.float()[:, :size]
    # The interpreter rounds ties away from zero, and loses the carry where rounding reaches the next power of two.
    carries = (wanted.abs().frexp().mantissa == 0.5) & (exact.abs() < wanted.abs())
    assert torch.equal((given - exact).abs()[~carries], (wanted - exact).abs()[~carries])
    assert not seen.float()[:, size:].any()
