"""The operations of each device are those of torch, on random batches: one table for all of them.

Bits are compared where an operation promises them, else values. An operation that a device gets a kernel for must be
in the table.
"""

import inspect
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.cpu.library import kernels
from specray.ops.cpu.ops import CpuOps
from specray.ops.device_ops import ops_on
from specray.ops.noise import noise_keys
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.ops.states import StateRows
from specray.ops.states_torch import Convolution, DeltaNet
from specray.ops.torch_ops import TorchOps
from specray.spec_decode.draft_tree import DraftTree
from tests.support.distributions import OPTIONS
from tests.support.sampling import CPU, mask_of

SIZE, VOCAB = 96, 512
FACTS = {"has_bfloat16", "groups_experts", "use_threads"}  # say what a device can do, or set it up
PARTS = {"pack_norm", "gate"}  # compared by what reads their results
ELSEWHERE = {"quantise_rows"}  # by `test_gpu_layer_kernels`: the interpreter rounds float8 in its own way


class Random:
    """Random tensors, always the same for one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.generator)

    def count(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self.generator))


class Case(NamedTuple):
    """One operation on a random batch."""

    run: Callable[[TorchOps, Random], Any]
    tolerance: float = 0.0  # 0: the same bits


def linear(ops: TorchOps, random: Random) -> Tensor:
    weight, bias = random.normal(2 * SIZE, SIZE), random.normal(2 * SIZE)
    return ops.linear(weight, bias)(random.normal(random.count(0, 9), SIZE))


def gated(ops: TorchOps, random: Random) -> Tensor:
    return ops.gated(random.normal(2 * SIZE, SIZE))(random.normal(random.count(0, 9), SIZE))


def batched(ops: TorchOps, random: Random) -> Tensor:
    return ops.batched(random.normal(3, 2 * SIZE, SIZE))(random.normal(3, random.count(0, 9), SIZE))


def sigmoid(ops: TorchOps, random: Random) -> Tensor:
    return ops.sigmoid(random.normal(random.count(0, 9), SIZE) * 5)


def rms_norm(ops: TorchOps, random: Random) -> Tensor:
    weight = ops.pack_norm(random.normal(SIZE))
    return ops.rms_norm(random.normal(random.count(0, 9), SIZE) * 3, weight, 1e-5)


def norm_parts(ops: TorchOps, random: Random) -> Tensor:
    weights = torch.stack([ops.pack_norm(random.normal(SIZE)) for _ in range(3)])
    return ops.norm_parts(random.normal(random.count(1, 9), 3 * SIZE) * 3, weights, 1e-5)


def add_rms_norm(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor]:
    x, residual = random.normal(2, random.count(1, 9), SIZE)
    return ops.add_rms_norm(x, residual, ops.pack_norm(random.normal(SIZE)), 1e-5)


def join_normed(ops: TorchOps, random: Random) -> Any:
    count, norms = random.count(1, 9), (random.normal(SIZE), random.normal(SIZE))
    packed = ops.pack_norm(norms[0]), ops.pack_norm(norms[1])
    states = random.normal(count, SIZE)
    return ops.join_normed(random.below(20, count), random.normal(20, SIZE), states, packed, 1e-5, keeps=True)


def angles_at(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor]:
    tables = random.normal(50, 64), random.normal(50, 64)
    return ops.angles_at(tables, random.below(50, random.count(0, 9)), torch.float32)


def attention(ops: TorchOps, random: Random) -> Tensor:
    """A prompt chunk, a decoding row, a chain and trees with masks, in one batch and in one call of a layer."""
    heads, dim, num_slots, widest = 4, 32, 200, 40
    query_lens = [random.count(2, 20), 1, 4, 5]
    sizes = [(0, 0), (0, 0), (3, 3), (4, 4)]
    kv_lens = [length + random.count(0, widest - 20) for length in query_lens]
    pool = make_pool(2, num_slots, 2, dim, torch.float32, CPU)
    pool[:, 1:] = random.normal(2, num_slots - 1, 2, 2, dim)
    kv_slots = 1 + torch.randperm(num_slots - 1, generator=random.generator)[: 4 * widest].view(4, widest)
    written = [kv_slots[row, end - new : end] for row, (new, end) in enumerate(zip(query_lens, kv_lens, strict=True))]
    chain = DraftTree.chains(torch.arange(4)[None]).ancestors()[:, 1:, 1:]
    forked = torch.eye(4, dtype=torch.bool)
    forked[2:, 0] = True
    mask = torch.zeros(4, 4, 4, dtype=torch.bool)
    mask[2, :3, :3], mask[3] = chain[0], forked
    batch = AttentionBatch(query_lens, kv_lens, kv_slots, torch.cat(written), sizes, mask)
    count = sum(query_lens)
    kv = random.normal(count, 2, 2, dim)
    return ops.attention(pool, heads).plan(batch)(1, random.normal(count, heads, dim), kv)


def commit_paths(ops: TorchOps, random: Random) -> Tensor:
    """Paths of up to 6 of 12 nodes; some rows keep nothing, and some the root alone."""
    rows, nodes, depths = 4, 12, 6
    pool = random.normal(2, 64, 2, 2, 16)
    kv_slots = 4 + torch.randperm(60, generator=random.generator)[: rows * nodes].view(rows, nodes)
    kept = random.below(depths + 1, rows)
    kept[0] = 0
    paths = torch.zeros(rows, depths, dtype=torch.int64)
    for path in paths:
        path[1:] = 1 + torch.randperm(nodes - 1, generator=random.generator)[: depths - 1].sort().values
    outcome = torch.cat((kept[:, None], kept[:, None], torch.zeros(rows, depths).long(), paths), 1)
    ops.commit_paths(pool, kv_slots, outcome)
    return pool


def state_rows(random: Random) -> StateRows:
    """A new prompt, a chunk of a prompt, a decoding request, a chain and a tree."""
    trees = [[-1], [-1], [-1], [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2, 5]]
    known = [random.count(1, 9), random.count(1, 9), 1, 1, random.count(1, 3)]
    lens = [count + len(tree) - 1 for count, tree in zip(known, trees, strict=True)]
    slots, others = torch.randperm(10, generator=random.generator).split(5)
    places = [random.count(0, 9) for _ in trees]  # some of them behind no known row
    copies = [{place: slot} for place, slot in zip(places, others.tolist(), strict=True)]
    return StateRows.of(slots.tolist(), lens, known, [True, False, False, True, False], trees, copies)


def convolve(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor]:
    rows, width, size = state_rows(random), random.count(2, 5), 21
    bias = random.normal(size) if random.count(0, 1) else None
    conv = Convolution(random.normal(width, size), bias, has_silu=bool(random.count(0, 1)))
    pool = random.normal(10, width - 1, size)
    return ops.convolve(conv, random.normal(rows.total, size), pool, rows), pool


def gated_delta(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor]:
    rows, keys, values, k_dim = state_rows(random), 2, 4, random.count(3, 9)
    v_dim = [3, 8, 45][random.count(0, 2)]
    rates, bias = -random.normal(values).exp(), random.normal(values)
    net = DeltaNet(keys, values, k_dim, v_dim, rates, bias, random.normal(v_dim), 1e-5, 1.5)
    pool = random.normal(10, values, k_dim, v_dim)
    a, b = random.normal(2, rows.total, values)
    qkv, z = random.normal(rows.total, net.num_channels), random.normal(rows.total, values * v_dim)
    return ops.gated_delta(net, qkv, a, b, z, pool, rows), pool


def logits_of(random: Random, rows: int) -> Tensor:
    logits = random.normal(rows, VOCAB) * 3
    if rows > 2:
        logits[1, 7] = [math.nan, math.inf, -math.inf][random.count(0, 2)]
    return logits


def argmax(ops: TorchOps, random: Random) -> Tensor:
    return ops.argmax(logits_of(random, random.count(0, 6)).round())  # with ties


def options(random: Random, rows: int) -> SamplingBatch:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}]
    chosen = [kinds[random.count(0, len(kinds) - 1)] for _ in range(rows)]
    states = [OPTIONS._replace(**{"temperature": 0.8, **kind, "seed": random.count(0, 99)}) for kind in chosen]
    return SamplingBatch.of([SamplingState(state) for state in states], CPU)


def sample(ops: TorchOps, random: Random) -> Tensor:
    rows = random.count(1, 6)
    batch = options(random, rows)
    sampled = [row for row, state in enumerate(batch.states) if state.is_sampled]
    keys = noise_keys(batch.seeds, random.below(99, rows))
    return ops.sample(random.normal(rows, VOCAB) * 3, batch, keys, sampled)


def sample_padded(ops: TorchOps, random: Random) -> Tensor:
    rows = random.count(1, 6)
    batch = options(random, rows)
    return ops.sample_padded(random.normal(rows, VOCAB), batch, noise_keys(batch.seeds, random.below(99, rows)))


def top_probs(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor]:
    return ops.top_probs(random.normal(random.count(1, 3), 2, VOCAB), 5)


def forbid(ops: TorchOps, random: Random) -> Tensor:
    logits, rows = random.normal(6, VOCAB), random.count(1, 4)
    allowed = random.normal(rows, VOCAB) > 0
    mask = mask_of(allowed, torch.randperm(6, generator=random.generator)[:rows].tolist())
    ops.forbid(logits, *mask)
    return logits


class Noise(NamedTuple):
    """Of a greedy and two sampled requests."""

    temperature: Tensor
    keys: Tensor
    ids: Tensor | None


def noise(random: Random) -> Noise:
    ids = torch.randperm(5000, generator=random.generator)[:VOCAB] if random.count(0, 1) else None
    return Noise(torch.tensor([0.0, 0.7, 1.5]), noise_keys(random.below(99, 3), random.below(99, 3)), ids)


def with_noise(ops: TorchOps, random: Random) -> Tensor:
    return ops.with_noise(random.normal(3, random.count(1, 4), VOCAB), *noise(random))


def level_keys(ops: TorchOps, random: Random) -> Tensor:
    rows = random.count(1, 4)
    return ops.level_keys(random.below(2**40, rows), random.below(4000, rows), random.count(1, 5))


def choose_drafts(ops: TorchOps, random: Random) -> Tensor:
    temperature, keys, ids = noise(random)
    heat = (temperature, keys) if random.count(0, 1) else (None, None)
    found = ops.choose_drafts(random.normal(3, VOCAB), *heat, ids)
    return torch.stack((found.tokens, found.is_finite.long()))


def soft_labels(ops: TorchOps, random: Random) -> Any:
    return ops.soft_labels(random.normal(random.count(1, 9), SIZE), random.normal(VOCAB, SIZE))


def compare(ops: TorchOps, random: Random) -> tuple[Tensor, Tensor, Tensor]:
    rows, logits = random.count(1, 9), random.normal(4, VOCAB)
    probs, wanted = random.normal(4, VOCAB).softmax(-1), random.normal(rows, VOCAB)
    losses, agrees = torch.empty(rows), torch.empty(rows, dtype=torch.bool)
    labels = probs, probs.argmax(-1)
    ops.compare_(wanted, labels, random.below(len(logits), rows), 0.4, losses, agrees)
    return wanted, losses, agrees


CASES = {
    "linear": Case(linear, 1e-4),
    "gated": Case(gated, 1e-4),
    "batched": Case(batched, 1e-4),
    "sigmoid": Case(sigmoid, 1e-6),
    "rms_norm": Case(rms_norm, 1e-5),
    "norm_parts": Case(norm_parts, 1e-5),
    "add_rms_norm": Case(add_rms_norm, 1e-5),
    "join_normed": Case(join_normed, 1e-5),
    "angles_at": Case(angles_at),
    "attention": Case(attention, 1e-4),
    "commit_paths": Case(commit_paths),
    "convolve": Case(convolve, 1e-5),
    "gated_delta": Case(gated_delta, 1e-4),
    "argmax": Case(argmax),
    "sample": Case(sample),
    "sample_padded": Case(sample_padded),
    "top_probs": Case(top_probs, 1e-5),
    "forbid": Case(forbid),
    "with_noise": Case(with_noise, 1e-5),
    "level_keys": Case(level_keys),
    "choose_drafts": Case(choose_drafts),
    "soft_labels": Case(soft_labels, 1e-5),
    "compare_": Case(compare, 1e-5),
}


DEVICES: dict[str, type[TorchOps]] = {"cpu": CpuOps}
if find_spec("triton") is not None:
    from specray.ops.gpu.ops import TritonOps

    DEVICES["triton"] = TritonOps


def replaced(ops: type[TorchOps]) -> set[str]:
    """The operations for which a device has kernels."""
    return {name for name, member in vars(ops).items() if inspect.isfunction(member)} - {"__init__"}


PAIRS = [
    (device, name) for device, ops in DEVICES.items() for name in sorted(replaced(ops) - FACTS - PARTS - ELSEWHERE)
]


@pytest.mark.parametrize(("device", "name"), PAIRS)
def test_an_operation_is_that_of_torch(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels run in its interpreter."""
    if device == "cpu" and kernels() is None:
        pytest.skip("needs the compiled kernels")
    monkeypatch.setenv("SPECRAY_KERNELS", "triton" if device == "triton" else "auto")
    ops, case = ops_on(CPU), CASES[name]
    assert ops.name == device
    for seed in range(10):
        expected, found = case.run(TorchOps(), Random(seed)), case.run(ops, Random(seed))
        torch.testing.assert_close(found, expected, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_an_operation_with_a_kernel_has_a_specification(device: str) -> None:
    assert replaced(DEVICES[device]) <= replaced(TorchOps)
