"""The choice of tokens by Triton's kernels, in the interpreter, equals that of torch's operations."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specray.ops import filters
from specray.ops import sampling as torch_sampling
from specray.ops.gpu import sampling
from specray.ops.noise import gumbel, noise_keys
from specray.ops.sampling_state import GREEDY_BELOW, SamplingBatch
from specray.ops.shard_sampling import choose_in_shard
from specray.ops.torch_ops import TorchOps
from specray.spec_decode.tree_noise import TreeNoise
from specray.step import SamplingOptions
from tests.support.distributions import OPTIONS
from tests.support.gpu_noise import noise_of_kernels
from tests.support.sampling import CPU, state_of
from tests.support.triton_loads import bytes_read

SIZE = 37  # not a multiple of a block, and several blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 16), ("FILTER_BLOCK", 32), ("PIVOTS", 64)):  # with few passes, which are slow here
        monkeypatch.setattr(f"specray.ops.gpu.sampling.{name}", value)


@pytest.fixture(autouse=True)
def torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is torch's, not the CPU kernels'."""
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")


seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds, st.integers(0, 2**31), st.integers(0, 200_000))
@settings(max_examples=30)
def test_the_noise_is_that_of_torch(seed: int, position: int, first_id: int) -> None:
    """Bit by bit before the logarithms, and to a few units in the last place behind them."""
    ids = first_id + torch.arange(500, dtype=torch.int32)
    keys = noise_keys(torch.tensor([seed]), torch.tensor([position]))
    uniform, noise = noise_of_kernels(ids, keys)
    expected = -torch.log(-torch.log1p(-uniform.double()))
    torch.testing.assert_close(noise.double(), expected, atol=3e-7, rtol=3e-7)
    torch.testing.assert_close(noise[None], gumbel(keys, 500, ids.long()), atol=1e-6, rtol=1e-6)
    assert torch.equal(-torch.log(-torch.log1p(-uniform))[None], gumbel(keys, 500, ids.long()))


def test_large_noise_is_exact_too() -> None:
    """Small uniforms give the largest noise, which decides most often."""
    keys = noise_keys(torch.tensor([3]), torch.tensor([5]))
    best = gumbel(keys, 200_000)[0].topk(20).indices.to(torch.int32)
    uniform, noise = noise_of_kernels(best, keys)
    expected = -torch.log(-torch.log1p(-uniform.double()))
    assert float(expected.max()) > 11
    torch.testing.assert_close(noise.double(), expected, atol=1e-6, rtol=1e-7)


options = st.builds(
    lambda temperature, top_k, top_p, min_p, seed: OPTIONS._replace(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    ),
    st.sampled_from([0.0, 1e-6, 2e-5, 0.3, 1.0, 7.0, 1e4]),
    st.sampled_from([0, 0, 1, 2, 5, SIZE, 10 * SIZE]),
    st.sampled_from([1e-6, 0.137, 0.53, 0.91, 0.9993, 1.0, 1.0]),
    st.sampled_from([0.0, 0.0, 0.013, 0.3, 0.97]),
    seeds,
)
TIED = [-1.0, 0.0, -0.0, 0.5, 2.0, -math.inf]
finite = st.floats(-30, 30, width=32)
kinds = [st.sampled_from(TIED), finite, st.one_of(finite, st.sampled_from([*TIED, math.inf, math.nan]))]
logits_of_a_row = st.sampled_from(kinds).flatmap(lambda kind: st.lists(kind, min_size=SIZE, max_size=SIZE))
Row = tuple[list[float], SamplingOptions]
rows = st.lists(
    st.tuples(logits_of_a_row, options).filter(lambda row: is_clear(torch.tensor(row[0]), row[1])),
    min_size=1,
    max_size=2,
)


def batch_of(chosen: Sequence[SamplingOptions]) -> SamplingBatch:
    return SamplingBatch.of([state_of(option, size=SIZE) for option in chosen], CPU)


def is_clear(logits: Tensor, option: SamplingOptions) -> bool:
    """Whether no sum of probabilities, no token and no order of two tokens is so near a bound that rounding decides.

    torch's operations sort rounded log-probabilities, which a high temperature makes equal.
    """
    if option.temperature < GREEDY_BELOW or not logits.max().isfinite():
        return True
    sorts = option.top_k > 0 or option.top_p < 1.0
    if sorts and len((logits / option.temperature).log_softmax(-1).unique()) < len(logits.unique()):
        return False
    scaled = (logits / option.temperature).double()
    probs = scaled.softmax(-1).sort(descending=True).values[: option.top_k or SIZE]
    masses = probs.cumsum(-1) / (probs.sum() if option.top_k else 1.0)
    is_far_from_p = option.top_p >= 1.0 or bool(((masses - option.top_p).abs() > 1e-5).all())
    ratios = (scaled - scaled.max()).exp()
    return is_far_from_p and (not option.min_p or bool(((ratios - option.min_p).abs() > 1e-5).all()))


@given(rows)
@settings(max_examples=40)
def test_the_choice_is_that_of_torch(chosen: list[Row]) -> None:
    logits = torch.tensor([values for values, _ in chosen])
    batch = batch_of([option for _, option in chosen])
    keys = noise_keys(batch.seeds, torch.arange(len(logits)) + 5)
    assert sampling.sample(logits, batch, keys).tolist() == torch_sampling.sample(logits, batch, keys).tolist()


def lowest_of(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The smallest scaled logits that pass, with a token as the unfiltered choice that passes only if all do."""
    worst = logits.argmin(1, keepdim=True).to(torch.int32)
    return sampling._find_lowest(torch.zeros_like(worst), worst, sampling.Rows(logits), batch)


@given(rows)
@settings(max_examples=40)
def test_filters_keep_the_tokens_that_torch_keeps(chosen: list[Row]) -> None:
    """The bisection ends at the logit that a sort finds, so a score is kept or cut alike."""
    logits = torch.tensor([values for values, _ in chosen]).nan_to_num(0.25, 1.0, -math.inf)
    batch = batch_of([option._replace(temperature=max(option.temperature, GREEDY_BELOW)) for _, option in chosen])
    assume(all(is_clear(values, state.options) for values, state in zip(logits, batch.states, strict=True)))
    lowest = lowest_of(logits, batch)
    scaled = logits / batch.temperature[:, None]
    expected = filters.scores(logits, batch)
    assert torch.equal(scaled.masked_fill(scaled < lowest[:, None], -torch.inf), expected)


@given(st.data())
@settings(max_examples=12)
def test_a_mask_forbids_tokens_before_the_filters(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = torch.randn(3, SIZE, generator=generator) * 3
    is_allowed = torch.rand(3, SIZE, generator=generator) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    is_allowed[:, data.draw(st.integers(0, SIZE - 1))] = True
    batch = batch_of([data.draw(options) for _ in range(3)])
    masked = logits.masked_fill(~is_allowed, -torch.inf)
    assume(all(is_clear(values, state.options) for values, state in zip(masked, batch.states, strict=True)))
    words = torch.zeros(3, math.ceil(SIZE / 32), 32, dtype=torch.int64)
    words.flatten(1)[:, :SIZE] = is_allowed.long()
    packed = (words << torch.arange(32)).sum(-1)
    bits = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    keys = noise_keys(batch.seeds, torch.arange(3))
    assert sampling.sample(logits, batch, keys, bits).tolist() == torch_sampling.sample(masked, batch, keys).tolist()


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_drafts_have_the_targets_noise_and_its_ids(seed: int, has_ids: bool, is_sampled: bool) -> None:
    """At every level of a chain, for greedy and sampled requests side by side."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, SIZE, generator=generator) * 3
    logits[2, seed % SIZE] = [1.0, math.nan, math.inf][seed % 3]
    ids = torch.randperm(500, generator=generator)[:SIZE] if has_ids else None
    heat, seeds, ends = torch.tensor([0.0, 0.7, 1.5]), torch.tensor([1, seed, -seed]), torch.tensor([4, 9, 2])
    noise = TreeNoise(heat, seeds, ends, 3) if is_sampled else None
    rows = sampling.Rows(logits)
    for level in range(3):
        scores = logits if noise is None else noise.added(logits[:, None], level, ids)[:, 0]
        value, column = scores.max(-1)
        keys = None if noise is None else noise.keys[level]
        found = sampling.choose_drafts(rows, None if noise is None else heat, keys, ids)
        assert found.tokens.tolist() == (column if ids is None else ids[column]).tolist()
        assert (found.is_finite > 0).tolist() == value.isfinite().tolist()


@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
@settings(max_examples=15)
def test_the_noise_of_a_level_of_trees_is_that_of_torch(seed: int, has_ids: bool, num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, SIZE, num_nodes, generator=generator).transpose(1, 2)
    ids = torch.randperm(500, generator=generator)[:SIZE] if has_ids else None
    heat, seeds, ends = (
        torch.tensor([[0.0, 0.7, 1.5]] * 2).T[:, 0],
        torch.tensor([1, seed, -seed]),
        torch.tensor([4, 9, 2]),
    )
    noise = TreeNoise(heat, seeds, ends, 2)
    for level in range(2):
        expected = noise.added(logits, level, ids)
        found = sampling.with_noise(logits, heat, noise.keys[level], ids)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
        assert torch.equal(found[0], logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_half_type_are_chosen_from_as_their_float32_copies(dtype: torch.dtype) -> None:
    """Tokens, scores and noise, bit for bit: what multiplies with the output matrix need not widen its results."""
    logits = (torch.randn(6, SIZE, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    logits[1, 7], logits[2, 8], logits[3] = math.nan, math.inf, logits[3].round()  # the last one has ties
    every = [OPTIONS._replace(seed=seed, temperature=0.3 * seed) for seed in range(6)]
    every[4:] = [every[4]._replace(top_p=0.6), every[5]._replace(top_k=4, min_p=0.1)]
    batch, places, ids = batch_of(every), torch.arange(6), torch.randperm(500)[:SIZE]
    keys, heat = noise_keys(batch.seeds, places), batch.temperature
    found, wide = (
        [
            *sampling.choose(sampling.Rows(each), None, None),
            *sampling.choose(sampling.Rows(each), batch, keys),
            *sampling.choose_drafts(sampling.Rows(each), heat, keys, ids),
            sampling.with_noise(each[:, None], heat, keys, ids),
            *TorchOps().choose_drafts(each, heat, keys, ids),
            *choose_in_shard(TorchOps(), each, heat, keys, 5),
        ]
        for each in (logits, logits.float())
    )
    for part, expected in zip(found, wide, strict=True):
        assert part.dtype == expected.dtype
        assert torch.equal(part.nan_to_num(), expected.nan_to_num())


def test_a_row_without_an_allowed_token_is_not_finite() -> None:
    rows = sampling.Rows(torch.randn(2, SIZE), mask=torch.tensor([[0, 0], [-1, -1]], dtype=torch.int32))
    assert sampling.choose(rows, None, None).is_finite.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("option", "most"),
    [
        (OPTIONS._replace(top_p=0.9), 3),
        (OPTIONS._replace(top_k=12), 3),
        (OPTIONS._replace(top_p=0.95, top_k=20, min_p=0.01), 10),  # top-p is a share of what top-k keeps
    ],
)
def test_filters_are_bisected_only_where_the_unfiltered_choice_is_filtered_out(
    option: SamplingOptions, most: int
) -> None:
    """Most rows are read for their scores, their largest logit, and what is above the choice."""
    count, found = 16, []
    logits = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(3)) * 2
    batch = batch_of([option._replace(seed=seed) for seed in range(count)])
    keys, rows = noise_keys(batch.seeds, torch.arange(count)), sampling.Rows(logits)
    unfiltered = sampling.choose(rows, batch_of([OPTIONS] * count), keys).tokens
    read = bytes_read(logits, lambda: found.append(sampling.choose(rows, batch, keys).tokens))
    assert torch.equal(found[0], torch_sampling.sample(logits, batch, keys))
    num_bisected = int((found[0] != unfiltered).sum())
    assert 0 < num_bisected < count / 2
    assert read / logits[0].nbytes <= (most + 0.1) * count + 12 * num_bisected


@pytest.mark.parametrize("pivots", [2, 4])
def test_bisection_of_any_width_ends_at_the_same_logit(pivots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.ops.gpu.sampling.PIVOTS", pivots)
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(2))
    batch = batch_of([OPTIONS._replace(top_k=9), OPTIONS._replace(top_p=0.7)])
    lowest = lowest_of(logits, batch)
    assert torch.equal(logits.masked_fill(logits < lowest[:, None], -torch.inf), filters.scores(logits, batch))


def test_a_choice_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, SIZE, generator=generator)
    batch = batch_of([OPTIONS._replace(seed=seed, top_p=0.8, top_k=seed % 5) for seed in range(5)])
    keys = noise_keys(batch.seeds, torch.arange(5))
    together = sampling.choose(sampling.Rows(logits), batch, keys)
    for row in range(5):
        alone = sampling.choose(sampling.Rows(logits[row : row + 1]), batch.select([row]), keys[row : row + 1])
        assert [part[0] for part in alone] == [part[row] for part in together]
