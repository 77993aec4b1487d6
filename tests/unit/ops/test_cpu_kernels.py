"""The compiled CPU kernels: accuracy against float64, and results that depend on nothing but the row."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specray.ops import sampling
from specray.ops.cpu import processor
from specray.ops.cpu import sampling as cpu_sampling
from specray.ops.cpu.library import Kernels, kernels
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix
from specray.ops.cpu.ops import CpuOps
from specray.ops.cpu.structs import check_layouts, layouts, pointer
from specray.ops.grouped_weight import GroupedWeight, concatenated, to_int4, to_int8
from specray.ops.noise import gumbel, noise_keys
from specray.ops.quantised_weight import Weight
from specray.ops.sampling_state import SamplingBatch, SamplingState
from tests.support.distributions import OPTIONS

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")

WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16(),
    "float16": lambda weight: weight.half(),
    "int8": to_int8,
    "int4": to_int4,
    "int8 of tiny weights": lambda weight: to_int8(weight * 1e-6),
    "int4 of tiny weights": lambda weight: to_int4(weight * 1e-6),
    "int4 and int8": lambda weight: concatenated(
        [to_int4(weight[: len(weight) // 2]), to_int8(weight[len(weight) // 2 :])]
    ),
}
# (outputs, inputs)
SHAPES = [(1, 1), (16, 32), (17, 33), (100, 64), (48, 200)]


@pytest.fixture
def own() -> Kernels:
    found = kernels()
    assert found is not None
    return found


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(processor, "_count", count)
    return count


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def values(weight: Weight) -> Tensor:
    """What the stored numbers stand for, in float64."""
    return (weight.float() if isinstance(weight, GroupedWeight) else weight).double()


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_products_are_close_to_float64(kind: str, outs: int, ins: int, own: Kernels) -> None:
    weight, bias, x = WEIGHTS[kind](random(outs, ins)), random(outs), random(9, ins)
    exact = x.double() @ values(weight).T
    size = x.double().norm(dim=1, keepdim=True) * values(weight).norm(dim=1)  # bounds each output
    error = (PackedMatrix(own, weight)(x).double() - exact).abs() / size
    rounding = {"float32": 1e-6, "float16": 1e-6, "bfloat16": 0.004}.get(kind, 0.01)
    assert error.max() < rounding
    with_bias = PackedMatrix(own, weight, bias)(x)
    assert torch.equal(with_bias, PackedMatrix(own, weight)(x) + bias)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.usefixtures("num_threads")
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    kind: str, own: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = PackedMatrix(own, WEIGHTS[kind](random(100, 96))), random(40, 96)
    together = matrix(x)
    monkeypatch.setattr(processor, "_count", 1)
    for first in range(40):
        for count in (1, 2, 3, 5, 8, 13, 14, 15, 29):
            assert torch.equal(matrix(x[first : first + count]), together[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_activations_of_every_type(kind: str, dtype: torch.dtype, own: Kernels) -> None:
    weight, x = WEIGHTS[kind](random(40, 64)), random(3, 64).to(dtype)
    matrix = PackedMatrix(own, weight)
    y = matrix(x)
    assert y.dtype is dtype
    assert torch.equal(y, matrix(x.float()).to(dtype))
    assert torch.equal(matrix(x, torch.float32).to(dtype), y)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("outs", [32, 41])
def test_gated_products(kind: str, outs: int, own: Kernels) -> None:
    gate, up, x = WEIGHTS[kind](random(outs, 64)), WEIGHTS[kind](random(outs, 64) + 0.5), random(11, 64) * 4
    y = GatedMatrix(own, gate, up)(x)
    expected = torch.nn.functional.silu(PackedMatrix(own, gate)(x)) * PackedMatrix(own, up)(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_non_finite_rows_stay_so_and_change_no_others(kind: str, own: Kernels) -> None:
    matrix, x = PackedMatrix(own, WEIGHTS[kind](random(33, 64))), random(6, 64)
    clean = matrix(x)
    x[1, 3], x[2, 40], x[4, 0] = math.nan, math.inf, -math.inf
    y = matrix(x)
    assert not y[[1, 2, 4]].isfinite().any()
    assert torch.equal(y[[0, 3, 5]], clean[[0, 3, 5]])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_no_rows_and_rows_of_zeros(kind: str, own: Kernels) -> None:
    matrix = PackedMatrix(own, WEIGHTS[kind](random(20, 40)))
    assert matrix(torch.zeros(0, 40)).shape == (0, 20)
    assert not matrix(torch.zeros(2, 40)).any()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("scale", [2e-34, 1e-31])
def test_tiny_activations_are_close_to_float64(kind: str, scale: float, own: Kernels) -> None:
    weight, x = WEIGHTS[kind](random(17, 33)), random(9, 33) * scale
    exact = x.double() @ values(weight).T
    size = x.double().norm(dim=1, keepdim=True) * values(weight).norm(dim=1)
    assert ((PackedMatrix(own, weight)(x).double() - exact).abs() / size).max() < 0.01


@pytest.mark.parametrize(("to_groups", "error"), [(to_int8, 0.006), (to_int4, 0.09)])
def test_rounded_weights_are_close(to_groups: Callable[[Tensor], GroupedWeight], error: float) -> None:
    weight = random(50, 70)
    weight[3, :32] = 0.0
    weight[4] = 0.25
    rounded = to_groups(weight)
    assert rounded.shape == (50, 70)
    assert (rounded.float() - weight).norm() / weight.norm() < error
    assert not rounded.float()[3, :32].any()
    torch.testing.assert_close(rounded.float()[4], weight[4], rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 24, 576, 1000])
def test_norms_are_close_to_float64(own: Kernels, dtype: torch.dtype, size: int) -> None:
    x, weight = (random(5, 2, size) * 3).to(dtype), random(size)
    exact = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    precision = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(CpuOps(own).rms_norm(x, weight, 1e-5).double(), exact, rtol=precision, atol=1e-6)


def test_parts_are_normed_with_their_own_weights(own: Kernels) -> None:
    ops, x, weights = CpuOps(own), random(5, 3 * 20), random(3, 20)
    pairs = zip(x.chunk(3, -1), weights, strict=True)
    parts = [ops.rms_norm(part.contiguous(), weight, 1e-5) for part, weight in pairs]
    assert torch.equal(ops.norm_parts(x, weights, 1e-5), torch.cat(parts, -1))


@pytest.mark.parametrize("size", [1, 15, 16, 1000])
@pytest.mark.parametrize("has_ids", [False, True])
def test_noise_is_that_of_torch(own: Kernels, size: int, has_ids: bool) -> None:
    logits, ids = random(size), torch.randperm(3 * size)[:size] if has_ids else None
    [keys] = noise_keys(torch.tensor([7, 2**40 + 1, -3]), torch.tensor([5, 5, 6]))[None]
    for key in keys:
        noisy = logits.clone()
        own.add_noise(pointer(noisy), size, pointer(ids), 0.7, pointer(key.contiguous()))
        torch.testing.assert_close(noisy, logits / 0.7 + gumbel(key, size, ids), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("size", [7, 1000, 49_152])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"top_k": 700, "top_p": 0.95, "min_p": 0.001},
        {"temperature": 20.0, "top_p": 0.999},
    ],
    ids=str,
)
def test_tokens_are_those_that_torch_chooses(
    own: Kernels, size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (random(24, size) * 3).round(decimals=1)  # with ties
    chosen = [OPTIONS._replace(**{"temperature": 0.8, **options, "seed": seed}) for seed in range(len(logits))]
    batch = SamplingBatch.of([SamplingState(option) for option in chosen], torch.device("cpu"))
    keys = noise_keys(batch.seeds, torch.arange(len(logits)))
    tokens = cpu_sampling.sample(own, logits, batch, keys)
    assert cpu_sampling.sample(own, logits[:0]).shape == (0,)
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    assert torch.equal(tokens, sampling.sample(logits, batch, keys))


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("size", [10, 63, 64, 1000])
def test_the_most_probable_tokens_are_those_of_a_stable_sort(own: Kernels, size: int, count: int) -> None:
    logits = (random(4, 2, size) * 4).round() / 2  # with ties
    probs, indexes = CpuOps(own).top_probs(logits, count)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(indexes, order)
    torch.testing.assert_close(probs, logits.softmax(-1).gather(-1, order))


def test_the_top_probabilities_of_a_row_with_nan_have_nan_probabilities(own: Kernels) -> None:
    logits = random(3, 200)
    logits[1, 150] = math.nan
    probs, _ = CpuOps(own).top_probs(logits, 4)
    assert probs[1].isnan().all()
    assert probs[[0, 2]].isfinite().all()


def test_a_library_whose_structs_differ_is_not_used(own: Kernels) -> None:
    """A kernel would read a field where another one lies."""
    compiled = own._library.specray_layouts().decode()
    check_layouts(compiled)
    moved = compiled.replace(" outs 4 4 ins 8 4", " ins 4 4 outs 8 4")
    assert moved != compiled
    for text in (
        moved,
        compiled.replace("DraftTrees 104", "DraftTrees 112"),
        compiled[: compiled.rindex("PendingTrees")],
    ):
        assert text != compiled
        with pytest.raises(RuntimeError, match="is not that of the compiled kernels"):
            check_layouts(text)
    assert layouts() == compiled
